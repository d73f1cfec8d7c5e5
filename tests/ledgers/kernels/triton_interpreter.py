"""Triton's interpreter on a CPU, whose products add along the inputs in order, as a tensor core's do.

numpy's own product chooses its order by the sizes of both sides. Import this before any kernel; `tests/conftest.py`
turns the interpreter on.
"""

import triton_platform  # noqa: F401  skips the importing tests elsewhere
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _dot(self, a, b, d, _input_precision, _max_num_imprecise_acc):
    total = d.data.copy()
    left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[k]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _patch_tensor(tensor, scope):
    """numpy 2.4 converts no array of one number to an integer, as triton 3.6 asks it to."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter.InterpreterBuilder.create_dot = _dot
interpreter._patch_lang_tensor = _patch_tensor
