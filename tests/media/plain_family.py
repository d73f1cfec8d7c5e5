"""A family of models that takes pictures as they are, but for some widths."""

from __future__ import annotations

import inline_workers
import numpy as np

from tureen.errors import InvalidRequest
from tureen.media.base import Normalisation, PicturePart, Prepared

FAULT, REFUSE, END, WAIT = range(901, 905)


class PlainFamily:
    """Pictures keep their size; a token for each eight columns. The frames of a film have the size of the first."""

    placeholder = "<image>"
    placeholder_id = 7
    video_placeholder = "<video>"
    video_placeholder_id = 8
    part_tokens = ()
    normalisation = Normalisation(1 / 255, (0.5,) * 3, (0.5,) * 3)

    def prepare(self, pictures, modality):
        for picture in pictures:
            ACTIONS.get(picture.width, lambda: None)()
        if modality == "video":
            same = [np.asarray(one.resize(pictures[0].size)) for one in pictures]
            return [Prepared(np.stack(same), len(pictures), (len(pictures),))]
        return [Prepared(np.asarray(one)[None], max(1, one.width // 8), one.size) for one in pictures]

    def parts(self, prepared):
        return (PicturePart(prepared.num_tokens),)


def fault():
    raise KeyError("/home/secret at 0x7f001122")


def refuse():
    raise InvalidRequest("has no place in this model")


def end():
    inline_workers.at_work().lose(inline_workers.ended_by_itself)


def wait():
    inline_workers.wait_until_lost()


ACTIONS = {FAULT: fault, REFUSE: refuse, END: end, WAIT: wait}
