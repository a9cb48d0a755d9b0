"""What stands on the board: a claimer's record, and whether its writer is still there.

Anybody may have written it, so nothing in it is taken for what it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuaff.records import dataclass
from gpuaff.system import kernel
from gpuaff.system.kernel import ThreadFacts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST = (1 << 53) - 1
"""The largest number in a record that counts: other languages' JSON has no larger ones."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What stands in a slot whose writer lives.

    Attributes:
        slot: its number.
        waits: whether the writer waits, else it holds GPUs.
        record: what it has written; empty when that cannot be read.
    """

    slot: int
    waits: bool
    record: Mapping[str, Any]

    @property
    def pid(self) -> int | None:
        """The writer's process id, in its own PID namespace."""
        return self._number("pid")

    @property
    def start(self) -> int | None:
        """When the writer started, in clock ticks since the machine did."""
        return self._number("start")

    @property
    def uid(self) -> int | None:
        """The number of the user for whom the writer acts."""
        return self._number("uid")

    @property
    def since(self) -> float | None:
        """Since when the writer waits, or holds, in seconds since 1970."""
        return self._time("since")

    @property
    def wanted(self) -> int | None:
        """How many GPUs one who waits wants."""
        return self._number("wanted")

    @property
    def ticket(self) -> int:
        """The writer's place in the line; the lower is the first."""
        return self._number("ticket") or 0

    @property
    def beat(self) -> float | None:
        """When the writer last told that it is well, in seconds since the machine started."""
        return self._time("beat")

    @property
    def gpus(self) -> tuple[str, ...]:
        """What it holds, or would take, by UUID; of one that waits, empty is any."""
        found = self.record.get("gpus")
        return tuple(g for g in found if isinstance(g, str)) if isinstance(found, list) else ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs among :attr:`gpus`, of a claim inside a claim too (``3/GPU-…``)."""
        return tuple(_uuid(key) for key in self.gpus)

    @property
    def inside(self) -> int | None:
        """The slot of the claim that this one is inside of; None when it is inside of none."""
        slot = self.gpus[0].partition("/")[0] if self.gpus else ""
        return int(slot) if slot.isdecimal() and len(slot) < 6 else None

    def text(self, key: str) -> str:
        """A text of the record; empty when there is none."""
        found = self.record.get(key)
        return found if isinstance(found, str) else ""

    def _time(self, key: str) -> float | None:
        found = self.record.get(key)
        if isinstance(found, float):  # NaN and infinity, which Python's JSON has, do not fit
            return found if 0 <= found <= MOST else None
        return self._number(key)

    def _number(self, key: str) -> int | None:
        found = self.record.get(key)
        fits = isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MOST
        return found if fits else None


def _uuid(key: str) -> str:
    slot, _, rest = key.partition("/")  # old names of MIG instances have slashes, too
    return rest if slot.isdecimal() else key


def stopped(found: Iterable[Entry]) -> frozenset[int]:
    """The slots whose writers are stopped (SIGSTOP, Ctrl-Z) or exiting, as far as can be seen."""
    return frozenset(
        e.slot
        for e in found
        if is_exiting(e) or ((facts := _facts(e)) is not None and facts.stopped)
    )


def ending(found: Iterable[Entry]) -> frozenset[str]:
    """The devices, by UUID, of those that hold them, if all of these are exiting."""
    held = [(entry.devices, is_exiting(entry)) for entry in found if not entry.waits]
    stay = {uuid for devices, exits in held if not exits for uuid in devices}
    return frozenset(uuid for devices, exits in held if exits for uuid in devices) - stay


def is_exiting(entry: Entry) -> bool:
    """Whether the writer is exiting: soon the kernel gives back all that it holds."""
    return entry.pid is not None and _facts(entry) is not None and kernel.is_exiting(entry.pid)


def living(found: Iterable[Entry]) -> frozenset[int]:
    """The slots whose writers live and can be seen: their ids are those of this PID namespace.

    Others have ended, and children keep their slot, or are elsewhere.
    """
    return frozenset(e.slot for e in found if (facts := _facts(e)) is not None and not facts.ended)


def _facts(entry: Entry) -> ThreadFacts | None:
    """What the kernel tells of a writer; None when there is none, or another process."""
    if entry.pid is None:
        return None
    facts = kernel.thread_facts(entry.pid, entry.pid)
    return facts if facts is not None and facts.started == entry.start else None


def about_me() -> dict[str, Any]:
    """What a record says of its writer."""
    pid = kernel.process_id()
    facts = kernel.thread_facts(pid, pid)
    return {
        "pid": pid,
        "start": facts.started if facts else None,
        "uid": kernel.user_id(),
        "name": kernel.name_of(pid) or "",
        "since": kernel.wall_clock(),
        "beat": kernel.uptime(),
    }
