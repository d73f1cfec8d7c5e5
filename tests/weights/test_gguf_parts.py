"""A model that is split into files, as the gguf package splits it, is the model that it was before."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest
import tiny_gguf

from tureen.errors import StartupError
from tureen.weights.gguf import GgufFile
from tureen.weights.gguf_parts import open_gguf
from tureen.weights.source import open_model

TENSORS = {f"blk.{number}.attn_norm.weight": np.arange(32, dtype=np.float32) + number for number in range(7)}


@pytest.fixture
def split(tmp_path):
    """The first of the files that the gguf package makes of TENSORS, at most three to a file."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=3)
    writer.add_uint32("llama.block_count", 7)
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return tmp_path / names[0]


def test_all_tensors_of_all_parts_are_there_with_their_values(split):
    file = open_gguf(split)
    assert list(file.tensors) == list(TENSORS)
    assert file.metadata["llama.block_count"] == 7
    for name, values in TENSORS.items():
        assert np.array_equal(file.raw(file.tensors[name]).view(np.float32), values)
        file.release(file.tensors[name])
        assert np.array_equal(file.raw(file.tensors[name]).view(np.float32), values)


def test_the_model_has_the_name_without_the_number_and_all_files(split):
    source = open_model(split)
    assert (source.name, source.format) == ("m", "gguf")
    assert source.files == sorted(split.parent.iterdir())
    assert open_model(split.parent).path == split


def test_a_part_that_is_missing_is_named(split):
    split.with_name("m-00002-of-00003.gguf").unlink()
    with pytest.raises(StartupError, match=r"m-00002-of-00003\.gguf: there is no such file"):
        open_gguf(split)


def test_a_later_part_names_the_first(split):
    with pytest.raises(StartupError, match=r"part 2 of 3 of a model; give the first one, such as m-00001-of-00003"):
        open_gguf(split.with_name("m-00002-of-00003.gguf"))


def test_a_first_part_under_another_name_says_how_it_must_be_called(split):
    shutil.move(split, split.with_name("other.gguf"))
    with pytest.raises(StartupError, match=r"must be called NAME-00001-of-00003\.gguf"):
        open_gguf(split.with_name("other.gguf"))


def test_parts_of_different_models_are_not_put_together(split, tmp_path):
    second = split.with_name("m-00002-of-00003.gguf")
    shutil.copy(split.with_name("m-00003-of-00003.gguf"), second)
    with pytest.raises(StartupError, match=r"m-00002-of-00003\.gguf: not part 2 of 3"):
        open_gguf(split)


def test_a_file_that_is_whole_is_opened_as_it_is(tmp_path):
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", {}, {"token_embd.weight": np.zeros((4, 4), np.float32)})
    assert type(open_gguf(path)) is GgufFile
