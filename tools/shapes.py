"""Pictures of coloured shapes and digits with what is to be said of them: drawn from a seed.

One picture shows one shape, up to four alike, two that differ, or a digit, at any place, size and rotation.
"""

from __future__ import annotations

import colorsys
import math
import random
from typing import Final, Literal, NamedTuple, get_args

from PIL import Image, ImageDraw, ImageFont

Kind = Literal["one", "several", "pair", "digit"]
Point = tuple[float, float]
RGB = tuple[int, int, int]

COLOURS: Final[dict[str, tuple[RGB, ...]]] = {
    "red": ((255, 0, 0), (220, 20, 40), (200, 0, 0)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 20)),
    "yellow": ((255, 255, 0), (255, 225, 30), (250, 235, 60)),
    "green": ((0, 128, 0), (0, 200, 0), (0, 255, 0), (40, 160, 60)),
    "blue": ((0, 0, 255), (30, 80, 220), (0, 0, 180), (40, 110, 240)),
    "purple": ((128, 0, 128), (110, 30, 180), (150, 50, 200)),
    "pink": ((255, 192, 203), (255, 105, 180), (255, 150, 190)),
    "brown": ((139, 69, 19), (120, 70, 30), (101, 60, 20)),
    "black": ((0, 0, 0), (25, 25, 25)),
    "white": ((255, 255, 255), (245, 245, 245)),
    "gray": ((128, 128, 128), (150, 150, 150), (110, 110, 110)),
}
SHAPES: Final = ("circle", "square", "rectangle", "triangle", "star", "heart", "cross", "arrow")
MOST_ROTATION: Final = {"square": 15, "rectangle": 15, "heart": 20, "circle": 0}  # degrees; of others: any
PLURALS: Final = {"cross": "crosses"}
NUMBERS: Final = ("", "One", "Two", "Three", "Four")
BACKGROUNDS: Final[tuple[RGB, ...]] = (
    (255, 255, 255), (255, 255, 255), (240, 240, 240), (250, 245, 230), (225, 235, 250), (220, 240, 220),
    (0, 0, 0), (40, 40, 60), (60, 60, 60), (180, 210, 240), (200, 200, 200), (240, 220, 180),
)  # fmt: skip
LEAST_CONTRAST: Final = 110.0  # distance of a shape's colour from the background's, in RGB
JITTER: Final = 10  # of each channel
OVERSAMPLING: Final = 2
PLACES_TRIED: Final = 200
APART: Final = 1.1  # least distance of two centres, in sums of their radii


class Thing(NamedTuple):
    colour: str
    shape: str  # one of SHAPES, or "number 7"


class Drawing(NamedTuple):
    picture: Image.Image  # RGB
    mask: Image.Image  # L, as large: 0 for the background, else 1 + the index of the thing
    things: tuple[Thing, ...]  # from left to right

    @property
    def sentence(self) -> str:
        """Such as "A red circle.", "Three blue stars.", "A pink heart and an orange arrow." or "A green number 7."."""
        return sentence(self.things)


class _Place(NamedTuple):
    """A circle that holds a thing: centre and radius in pixels."""

    x: float
    y: float
    radius: float


def draw(seed: int, kind: Kind | None = None) -> Drawing:
    """The drawing of this seed; the kind is drawn too unless it is given."""
    chance = random.Random(f"shapes {seed} {kind}")
    kind = kind or chance.choices(get_args(Kind), (58, 16, 14, 12))[0]
    width, height = _size(chance)
    background = chance.choice(BACKGROUNDS)
    things = _things(chance, kind, background)
    places = sorted(_places(chance, len(things), width, height))
    scale = OVERSAMPLING if chance.random() < 0.8 else 1
    large = (width * scale, height * scale)
    picture, mask = Image.new("RGB", large, background), Image.new("L", large)
    fill = _shade(chance, things[0].colour, background)
    for index, (thing, place) in enumerate(zip(things, places, strict=True)):
        if thing != things[0]:
            fill = _shade(chance, thing.colour, background)
        scaled = _Place(*(value * scale for value in place))
        _paint(chance, thing.shape, scaled, [(picture, fill), (mask, index + 1)])
    size = (width, height)
    return Drawing(picture.resize(size, Image.Resampling.LANCZOS), mask.resize(size, Image.Resampling.NEAREST), things)


def _size(chance: random.Random) -> tuple[int, int]:
    side = chance.randint(96, 320)
    if chance.random() < 0.7:
        return side, side
    longer = int(side * chance.uniform(1.0, 1.5))
    return (longer, side) if chance.random() < 0.7 else (side, longer)


def _things(chance: random.Random, kind: Kind, background: RGB) -> tuple[Thing, ...]:
    def thing() -> Thing:
        return Thing(chance.choice(visible), chance.choice(SHAPES))

    visible = [name for name, shades in COLOURS.items() if _contrast(shades[0], background) >= LEAST_CONTRAST]
    if kind == "digit":
        return (Thing(chance.choice(visible), f"number {chance.randrange(10)}"),)
    if kind == "several":
        return (thing(),) * chance.randint(2, 4)
    first = thing()
    if kind == "one":
        return (first,)
    second = thing()
    while second.colour == first.colour or second.shape == first.shape:
        second = thing()
    return first, second


def _contrast(one: RGB, other: RGB) -> float:
    return math.dist(one, other)


def _shade(chance: random.Random, colour: str, background: RGB) -> RGB:
    shades = [shade for shade in COLOURS[colour] if _contrast(shade, background) >= LEAST_CONTRAST]
    if chance.random() < 0.3:
        return shades[0]
    red, green, blue = chance.choice(shades)
    if colour in ("black", "white", "gray"):
        shift = chance.randint(-JITTER, JITTER)
        return _clip(red + shift), _clip(green + shift), _clip(blue + shift)
    hue, light, saturation = colorsys.rgb_to_hls(red / 255, green / 255, blue / 255)
    shifted = colorsys.hls_to_rgb(hue, light * chance.uniform(0.95, 1.05), saturation * chance.uniform(0.9, 1.0))
    return _clip(shifted[0] * 255), _clip(shifted[1] * 255), _clip(shifted[2] * 255)


def _clip(value: float) -> int:
    return min(max(round(value), 0), 255)


def _places(chance: random.Random, count: int, width: int, height: int) -> list[_Place]:
    """Circles that do not meet, in the central square: the part of a picture that the model sees."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    low, high = ((0.2, 0.46), (0.16, 0.26), (0.15, 0.22), (0.13, 0.2))[count - 1]
    while True:
        places: list[_Place] = []
        for _ in range(PLACES_TRIED):
            radius = chance.uniform(low, high) * side
            x, y = (chance.uniform(radius, side - radius) for _ in range(2))
            if all(
                math.dist((x, y), (place.x - left, place.y - top)) > APART * (radius + place.radius) for place in places
            ):
                places.append(_Place(left + x, top + y, radius))
            if len(places) == count:
                return places


def _paint(chance: random.Random, shape: str, place: _Place, canvases: list[tuple[Image.Image, RGB | int]]) -> None:
    """The shape on each of the canvases, in its colour."""
    if shape.startswith("number"):
        font = ImageFont.load_default(place.radius * 2)
        stroke = round(place.radius * chance.uniform(0, 0.12))
        for canvas, colour in canvases:
            ImageDraw.Draw(canvas).text(
                (place.x, place.y), shape[-1], fill=colour, font=font, anchor="mm", stroke_width=stroke
            )
        return
    most = MOST_ROTATION.get(shape, 180)
    angle = 0.0 if chance.random() < 0.4 else math.radians(chance.uniform(-most, most))
    points = [_turn(point, angle, place) for point in _outline(chance, shape)]
    border = max(round(place.radius * 0.06), 1) if chance.random() < 0.1 else 0
    for canvas, colour in canvases:
        edge = (0, 0, 0) if isinstance(colour, tuple) else colour
        ImageDraw.Draw(canvas).polygon(points, fill=colour, outline=edge if border else None, width=max(border, 1))


def _turn(point: Point, angle: float, place: _Place) -> Point:
    x, y = point
    turned = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
    return place.x + turned[0] * place.radius, place.y + turned[1] * place.radius


def _outline(chance: random.Random, shape: str) -> list[Point]:
    """Corners within the unit circle; y grows downwards."""
    if shape == "circle":
        return _around(72, (1.0,))
    if shape == "square":
        return _box(1.0)
    if shape == "rectangle":
        return _box(chance.choice((1, -1)) * chance.uniform(1.9, 3.0))
    if shape == "triangle":
        return _around(3, (1.0,))
    if shape == "star":
        return _around(10, (1.0, 0.42))
    if shape == "heart":
        return [_heart(math.tau * step / 60) for step in range(60)]
    if shape == "cross":
        arm = chance.uniform(0.2, 0.34)
        corner = [(arm, -0.94), (arm, -arm), (0.94, -arm)]
        return [
            (x * cos - y * sin, x * sin + y * cos) for cos, sin in ((1, 0), (0, 1), (-1, 0), (0, -1)) for x, y in corner
        ]
    return [(-0.95, -0.18), (0.1, -0.18), (0.1, -0.6), (0.98, 0.0), (0.1, 0.6), (0.1, 0.18), (-0.95, 0.18)]


def _around(count: int, radii: tuple[float, ...]) -> list[Point]:
    turns = [(math.tau * step / count, radii[step % len(radii)]) for step in range(count)]
    return [(radius * math.sin(turn), -radius * math.cos(turn)) for turn, radius in turns]


def _box(aspect: float) -> list[Point]:
    """Width over height; negative: height over width."""
    diagonal = math.hypot(aspect, 1)
    x, y = abs(aspect) / diagonal, 1 / diagonal
    if aspect < 0:
        x, y = y, x
    return [(-x, -y), (x, -y), (x, y), (-x, y)]


def _heart(turn: float) -> Point:
    x = 16 * math.sin(turn) ** 3
    y = 13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)
    return x / 18, (-y - 2.5) / 18


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def sentence(things: tuple[Thing, ...]) -> str:
    """See Drawing.sentence."""
    first = things[0]
    if len(set(things)) == 1 and len(things) > 1:
        return f"{NUMBERS[len(things)]} {first.colour} {PLURALS.get(first.shape, first.shape + 's')}."
    words = " and ".join(f"{article(thing.colour)} {thing.colour} {thing.shape}" for thing in things)
    return f"{words[0].upper()}{words[1:]}."
