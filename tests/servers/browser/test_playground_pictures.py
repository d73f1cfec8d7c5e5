"""Pictures in the playground: dropped and pasted, they reach a vision model, and it says what is on them."""

from __future__ import annotations

import base64
import io

import shape_drawings
from driving import answers, say, set_fields, wait_state

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


def give(page, kind: str, index: int = 0) -> str:
    """Drops or pastes an unseen drawing. Returns what it shows."""
    drawing, file = shapes.draw(shape_drawings.UNSEEN + index, "one"), io.BytesIO()
    drawing.picture.save(file, "PNG")
    page.evaluate(GIVE, [base64.b64encode(file.getvalue()).decode(), kind])
    page.wait_for_selector(".preview img")
    return drawing.sentence


QUESTION = "Describe this image in a very short sentence."


def test_a_picture_is_dropped_or_pasted_seen_and_there_after_a_reload(show, seeing_server):
    page = show(seeing_server.url)
    set_fields(page, temperature=0, max_new_tokens=16)
    give(page, "drop")
    page.get_by_role("button", name="Remove picture 1").click()
    say(page, "Hello")
    assert page.locator("article.user .pictures img").count() == 0
    for index, kind in enumerate(("drop", "paste")):
        page.click("#new-chat")
        shown = give(page, kind, index)
        say(page, QUESTION)
        wait_state(page, "done")
        assert answers(page) == [shown]
        assert page.locator("article.user .pictures img").count() == 1
        assert page.locator(".preview").count() == 0
    page.reload()
    page.wait_for_selector("article.user .pictures img")
    assert answers(page) == [shown]
