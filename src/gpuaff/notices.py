"""A remark that travels with a result: what was not as hoped, and what was done about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Notice:
    """One remark, for people (``message``) and for programs (``code``).

    Attributes:
        code: a stable word, e.g. ``near-unknown``; ``docs/warnings.md`` lists them all.
        message: one line: what was found, why, what to try.
        rank: the local rank that it concerns; None when it concerns all.
    """

    code: str
    message: str
    rank: int | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, str]:
        """The remark as JSON has it."""
        return {"code": self.code, "message": self.message}


def printable(text: str) -> str:
    """Text on one line without what a terminal would obey: it may quote what somebody wrote."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_reason(notices: Iterable[Notice]) -> list[Notice]:
    """Without ``no-gpu`` where another remark says why there is none."""
    said = list(notices)
    causes = {"no-driver", "visible-none", "visible-error"}
    told = any(notice.code in causes for notice in said)
    return [notice for notice in said if not (told and notice.code == "no-gpu")]
