"""Pictures in the playground: dropped and pasted, they reach a model that sees, and it says what is on them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import pytest
import shape_drawings
from driving import answers, say, set_fields, wait_state
from server_process import ServerProcess

from tureen.log import no_progress
from tureen.recipes import shapes_vlm

shapes = shape_drawings.load()
GIVE = """([data, kind]) => {
    const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "drawing.png", {type: "image/png"}));
    if (kind === "drop") document.getElementById("main").dispatchEvent(
        new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
    else document.getElementById("message").dispatchEvent(
        new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true}));
}"""


@pytest.fixture(scope="module")
def seeing(browser, default_model_source) -> Iterator[ServerProcess]:
    folder = shapes_vlm.build(default_model_source.path.parents[2], no_progress)
    with ServerProcess("--model-path", str(folder)) as running:
        yield running.wait_ready()


@pytest.fixture
def page(show, seeing):
    shown = show(seeing.url)
    set_fields(shown, temperature=0, max_new_tokens=16)
    return shown


def give(page, kind: str, index: int = 0) -> str:
    """Drops or pastes an unseen drawing. Returns what it shows."""
    drawing, file = shapes.draw(shape_drawings.UNSEEN + index, "one"), io.BytesIO()
    drawing.picture.save(file, "PNG")
    page.evaluate(GIVE, [base64.b64encode(file.getvalue()).decode(), kind])
    page.wait_for_selector(".preview img")
    return drawing.sentence


QUESTION = "Describe this image in a very short sentence."


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_picture_is_seen_by_the_model(page, kind):
    shown = give(page, kind)
    say(page, QUESTION)
    wait_state(page, "done")
    assert answers(page) == [shown]
    assert page.locator("article.user .pictures img").count() == 1
    assert page.locator(".preview").count() == 0


def test_a_picture_that_was_removed_is_not_sent(page):
    give(page, "drop")
    page.get_by_role("button", name="Remove picture 1").click()
    say(page, "Hello")
    assert page.locator("article.user .pictures img").count() == 0


def test_a_picture_stays_with_its_message_after_a_reload(page, seeing):
    shown = give(page, "drop", 1)
    say(page, QUESTION)
    wait_state(page, "done")
    page.reload()
    page.wait_for_selector("article.user .pictures img")
    assert answers(page) == [shown]
