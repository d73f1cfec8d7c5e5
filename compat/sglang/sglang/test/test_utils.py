"""What the pages ask about where they run."""


def is_in_ci() -> bool:
    """Return whether SGLang's own continuous integration runs the page; here it never does."""
    return False
