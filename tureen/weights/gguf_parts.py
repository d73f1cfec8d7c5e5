"""Opens a GGUF model that is split into files: NAME-00001-of-00003.gguf and so on, as llama.cpp splits them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tureen.fetching import ggufs
from tureen.weights.gguf import GgufFile
from tureen.weights.mapped import TensorInfo, unusable


class SplitGguf(GgufFile):
    """The parts of a model as if they were one file: the first one's metadata, the tensors of all, each in its part.

    Raises StartupError naming the part that is missing, or that does not belong to the others.
    """

    def __init__(self, path: Path, count: int) -> None:
        super().__init__(path)
        self._others: dict[str, GgufFile] = {}
        names = ggufs.parts(path.name)
        if len(names) != count or names[0] != path.name:
            raise unusable(path, f"the first of {count} parts, which must be called NAME-00001-of-{count:05}.gguf")
        for number, name in enumerate(names[1:], 1):
            part = GgufFile(path.with_name(name))
            if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
                raise unusable(part.path, f"not part {number + 1} of {count} of {path.name}")
            twice = self.tensors.keys() & part.tensors
            if twice:
                raise unusable(part.path, f"its tensor {min(twice)} is in another part, too")
            self.tensors.update(part.tensors)
            self.unreadable = self.unreadable or part.unreadable
            self._others.update(dict.fromkeys(part.tensors, part))
        expected = self.metadata.get("split.tensors.count")
        if isinstance(expected, int) and expected != len(self.tensors):
            raise unusable(path, f"the parts have {len(self.tensors)} tensors together, and should have {expected}")

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        part = self._others.get(tensor.name)
        return super().raw(tensor) if part is None else part.raw(tensor)

    def release(self, tensor: TensorInfo) -> None:
        part = self._others.get(tensor.name)
        if part is None:
            super().release(tensor)
        else:
            part.release(tensor)


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF model by its file, or by the first of its parts. Raises StartupError naming the file and the
    fault."""
    file = GgufFile(path)
    count, number = file.metadata.get("split.count"), file.metadata.get("split.no", 0)
    if not isinstance(count, int) or count < 2:
        return file
    if number != 0:
        first = ggufs.parts(path.name)[0]
        raise unusable(path, f"part {number + 1} of {count} of a model; give the first one, such as {first}")
    return SplitGguf(path, count)
