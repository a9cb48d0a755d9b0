"""Numbers in variables and arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable


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


# What a mistyped word was probably meant to be.


def suggestion(text: str, words: Iterable[str]) -> str:
    """``; did you mean X?`` when one of the words is near, else nothing."""
    from difflib import get_close_matches  # costs a millisecond, and few ever need it

    by_key = {word.replace("-", "_").lower(): word for word in words}
    near = get_close_matches(text[:80].replace("-", "_").lower(), by_key, n=1)
    return f"; did you mean {by_key[near[0]]}?" if near else ""
