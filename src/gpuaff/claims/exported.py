"""The variables that a claim sets, and their way back."""

from __future__ import annotations

from collections.abc import Mapping

from gpuaff.claims.undo import Undo
from gpuaff.records import dataclass
from gpuaff.system import environ


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Variables that were set.

    Attributes:
        before: what each was; None where it was unset.
        ours: what it was set to; None where it was unset.
    """

    before: Mapping[str, str | None]
    ours: Mapping[str, str | None]

    def put_back(self) -> None:
        """Set each to what it was; one that somebody has changed since is theirs."""
        for name, value in self.before.items():
            if environ.get(name) == self.ours[name]:
                environ.put(name, value)


def export(variables: Mapping[str, str | None], undo: Undo) -> None:
    """Set variables, for this process and those that it starts; None unsets one."""
    before = {name: environ.get(name) for name in variables}
    undo.add(Exported(before=before, ours=dict(variables)).put_back)
    for name, value in variables.items():
        environ.put(name, value)
