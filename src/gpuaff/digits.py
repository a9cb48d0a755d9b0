"""Numbers in variables and arguments."""

from __future__ import annotations

import operator


def natural(text: str | None) -> int | None:
    """Decimal digits and nothing else, of a size that can be meant; None for anything else.

    ``int`` alone would also take signs, blanks, underscores and other scripts' digits.
    """
    if text is None or len(text) > 9 or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)


def whole(value: object) -> int | None:
    """A whole number of any integer type (NumPy's too); a bool is not meant as one.

    Returns:
        None for anything else.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # TypeError says so
    except TypeError:
        return None
