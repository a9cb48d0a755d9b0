"""The variables that a claim sets, and their way back."""

from __future__ import annotations

from collections.abc import Mapping

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


def export(variables: Mapping[str, str | None]) -> Exported:
    """Set variables, for this process and those that it starts; None unsets one."""
    made = Exported(before={name: environ.get(name) for name in variables}, ours=dict(variables))
    try:
        for name, value in variables.items():
            environ.put(name, value)
    except BaseException:  # Ctrl-C between two of them
        for name, value in made.before.items():
            environ.put(name, value)
        raise
    return made
