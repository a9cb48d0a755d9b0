"""What a mistyped word was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def suggestion(text: str, words: Iterable[str]) -> str:
    """``; did you mean X?`` when one of the words is near, else nothing."""
    from difflib import get_close_matches  # costs a millisecond, and few ever need it

    by_key = {word.replace("-", "_").lower(): word for word in words}
    near = get_close_matches(text[:80].replace("-", "_").lower(), by_key, n=1)
    return f"; did you mean {by_key[near[0]]}?" if near else ""
