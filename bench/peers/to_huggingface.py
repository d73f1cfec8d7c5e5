"""A GGUF file's weights, dequantised to float32, as a folder for transformers, optimum and vLLM:

python bench/peers/to_huggingface.py FILE.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    del config["quantization_config"]  # transformers does not save a model that says it is quantised
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
