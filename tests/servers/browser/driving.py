"""What a user does in the playground, and what they then see."""

from __future__ import annotations

DONE = "article.assistant[data-state={state}]"


def say(page, text: str, *, wait: bool = True) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector("#stop", state="hidden")


def answers(page) -> list[str]:
    return [text.strip() for text in page.locator("article.assistant .body").all_text_contents()]


def wait_state(page, state: str) -> None:
    page.wait_for_selector(DONE.format(state=state))


def set_fields(page, **values: object) -> None:
    """Sets sampling parameters in the form, which may be out of sight."""
    for name, value in values.items():
        page.evaluate(
            """([id, text]) => {
                const field = document.getElementById(id);
                field.value = text;
                field.dispatchEvent(new Event("input", {bubbles: true}));
            }""",
            [f"field-{name}", str(value).lower() if isinstance(value, bool) else str(value)],
        )


def constrain(page, kind: str, text: str) -> None:
    page.evaluate("() => { document.getElementById('constraint-kind').closest('details').open = true; }")
    page.select_option("#constraint-kind", kind)
    page.fill("#constraint-text", text)


def tokens(page) -> list[str]:
    return page.locator("article.assistant .token[role=option]").all_text_contents()
