"""Drawings hold what their sentence says; SciPy counts, and colours are judged by the nearest one."""

from __future__ import annotations

import numpy as np
import pytest
import shape_drawings
from scipy import ndimage

shapes = shape_drawings.load()
SEEDS = range(60)


@pytest.fixture(scope="module")
def drawings():
    return [shapes.draw(seed) for seed in SEEDS]


def test_seeds_and_kinds_give_different_drawings(drawings):
    assert len({drawing.picture.tobytes() for drawing in drawings}) == len(SEEDS)
    assert {len(drawing.things) for drawing in drawings} == {1, 2, 3, 4}
    assert shapes.draw(0, "one").picture.tobytes() != shapes.draw(0, "digit").picture.tobytes()


def test_a_picture_shows_as_many_things_as_it_names(drawings):
    for drawing in drawings:
        assert ndimage.label(np.asarray(drawing.mask) > 0, np.ones((3, 3)))[1] == len(drawing.things)


def test_every_thing_has_its_colour(drawings):
    names = {shade: name for name, shades in shapes.COLOURS.items() for shade in shades}
    shades = np.array(list(names))
    for drawing in drawings:
        for index, thing in enumerate(drawing.things):
            inside = ndimage.binary_erosion(np.asarray(drawing.mask) == index + 1, iterations=3)
            if inside.any():
                typical = np.median(np.asarray(drawing.picture)[inside], axis=0)
                nearest = shades[np.square(shades - typical).sum(1).argmin()]
                assert names[tuple(nearest.tolist())] == thing.colour


def test_all_that_is_named_lies_in_the_part_that_the_model_sees(drawings):
    for drawing in drawings:
        width, height = drawing.picture.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        mask = np.asarray(drawing.mask) > 0
        seen = mask[top : top + side + 1, left : left + side + 1]
        assert seen.sum() == mask.sum()


@pytest.mark.parametrize(
    ("things", "sentence"),
    [
        ([("red", "circle")], "A red circle."),
        ([("orange", "arrow")], "An orange arrow."),
        ([("gray", "number 7")], "A gray number 7."),
        ([("blue", "cross")] * 3, "Three blue crosses."),
        ([("pink", "heart"), ("orange", "star")], "A pink heart and an orange star."),
    ],
)
def test_the_sentence_names_colour_shape_and_number(things, sentence):
    assert shapes.sentence(tuple(shapes.Thing(*thing) for thing in things)) == sentence
