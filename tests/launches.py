"""Counts what a step of a Llama launches on a GPU: operations of torch and Triton kernels, on tensors without data."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tureen.attention.base import ModelInput, PageTables
from tureen.models.torch_decoder import DecoderModel, layer_shape
from tureen.runner import cuda_graphs, loading

SIZES = {"hidden_size": 512, "intermediate_size": 256, "vocab_size": 1024, "head_dim": 64, "rms_norm_eps": 1e-5}
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 500000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
ROWS, PAGES, PAGE_SIZE = 4, 100, 16
FREE = ("view", "select", "slice", "t.", "transpose", "expand", "permute", "reshape", "detach", "as_strided", "split")
FREE += ("chunk", "unsqueeze", "alias", "_unsafe_view", "empty", "unbind", "squeeze", "flatten")
"""Operations that only describe memory, or take it."""


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = str(operation).removeprefix("aten.")
        is_same = name.startswith("to.") and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        self.number += not (name.startswith(FREE) or is_same)
        return result


def operations(num_layers, make_backend, prepare=lambda model: None):
    """Returns the number of operations of torch in a captured step with greedy rows.

    make_backend: of `tureen.attention`. prepare: is called with the model.
    """
    config = loading.describe(LLAMA | {"num_hidden_layers": num_layers})
    meta = torch.device("meta")
    with torch.inference_mode(), meta:
        model = DecoderModel(config, torch.bfloat16)
        shapes = [layer_shape(config, layer) for layer in range(num_layers)]
        keys, values = ([torch.empty(PAGES, PAGE_SIZE, 2, 64, dtype=torch.bfloat16) for _ in shapes] for _ in "kv")
        tables = PageTables(torch.empty(10, 64, dtype=torch.int32), torch.empty(ROWS, dtype=torch.int64), 512)
        integers = [torch.empty(ROWS, dtype=torch.int64) for _ in range(3)]
        inputs, results = ModelInput(*integers, (), None), torch.empty(3, ROWS, dtype=torch.int64)
    with torch.inference_mode():
        model.finish(1024, meta)
        prepare(model)
        backend = make_backend(shapes, keys, values)
        with meta, Count() as count:
            backend.plan_tables(inputs, tables)
            cuda_graphs._note_best(model.logits(model.forward(inputs, backend)), results)
    return count.number
