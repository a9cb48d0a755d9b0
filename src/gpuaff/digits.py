"""Numbers in variables and arguments."""

from __future__ import annotations


def natural(text: str | None) -> int | None:
    """Decimal digits and nothing else, of a size that can be meant; None for anything else.

    ``int`` alone would also take signs, blanks, underscores and other scripts' digits.
    """
    if text is None or len(text) > 9 or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)
