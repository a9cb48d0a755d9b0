"""Who the processes are that the driver lists: which are ours, which are leaving, their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gpuaff.claims.entries import Entry, living
from gpuaff.claims.model import DeviceReading
from gpuaff.claims.occupancy import People, listed
from gpuaff.claims.words import person
from gpuaff.system import kernel

_CUDA_OPENS = "/dev/nvidia-uvm"
"""What each process with a CUDA context has open, and one that only asks NVML has not."""


def people_on(readings: Sequence[DeviceReading], *, own_is_free: bool = True) -> People:
    """Who is who among the processes that the driver lists.

    Own are this process, what it has started, and what has started it: a parent that has made
    contexts and then starts ranks. Not what was started beside it: another rank of the job
    wants a GPU of its own.

    Outside of the first PID namespace the driver's numbers may be the host's, and happen to be
    those of processes here (case E15). So they count there only if each of them is here, and only
    one that has CUDA's device file open is taken for our own or named.

    Args:
        readings: what the driver lists.
        own_is_free: whether own processes count as free.
    """
    pids = listed(readings)
    first = kernel.in_first_pid_namespace()
    if not first and not _are_here(pids):
        return People(first_namespace=False)
    # First: one that ends between these two looks has ended in the second.
    exiting = frozenset(filter(kernel.is_exiting, pids))
    ended = frozenset(filter(kernel.has_ended, pids))
    own = frozenset(_relatives(pids)) if own_is_free else frozenset[int]()
    if not first:
        own = frozenset(filter(_computes, own))
    return People(
        own=own,
        ended=ended,
        exiting=exiting - ended,
        me=kernel.process_id(),
        first_namespace=first,
    )


def names_of(pids: Collection[int], people: People) -> dict[int, str]:
    """Processes in words, for messages; those that cannot be looked up are missing.

    It takes a while (psutil), so ask only when somebody is to be told.

    Args:
        pids: processes as the driver calls them.
        people: what is known of them: whether the numbers mean processes that are here.
    """
    if people.me is None:
        return {}
    sure = [pid for pid in pids if people.first_namespace or _computes(pid)]
    said = {pid: describe(pid) for pid in sure}
    return {pid: name for pid, name in said.items() if name is not None}


def describe(pid: int) -> str | None:
    """A process in words, with its own age.

    Returns:
        None when there is no such process, or it is not shown. What else it does not tell to this
        user is left out.
    """
    from gpuaff.system.processes import look_up

    found = look_up(pid)
    if found is None:
        return None
    return person(found.command, pid, user=found.user, since=found.started)


def describe_holder(pid: int, entry: Entry | None) -> str | None:
    """The holder of a lease in words, with the age of the lease where the board has that.

    Args:
        pid: the process.
        entry: what the board has of the lease; None where it has nothing.

    Returns:
        As :func:`describe`.
    """
    from gpuaff.system.processes import look_up

    found = look_up(pid)
    if found is None:
        return None
    since = None if entry is None else entry.since
    return person(found.command, pid, user=found.user, since=since)


def describe_writer(entry: Entry, *, since: float | None = None) -> str:
    """The process that has written on the board, in words: by /proc, else by what it has written.

    Args:
        entry: what it has written.
        since: when what is said of it began, in seconds since 1970; None says no age.
    """
    from gpuaff.system.processes import look_up, user_name

    alive = bool(living([entry]))
    found = look_up(entry.pid) if alive and entry.pid is not None else None
    command, user = (found.command, found.user) if found else (entry.text("name"), None)
    if user is None and entry.uid is not None:
        user = user_name(entry.uid)
    return person(command or "an unknown program", entry.pid, user=user, since=since)


def describe_waiter(entry: Entry) -> str:
    """A waiter in words, and for how many GPUs it waits."""
    wanted = "some" if entry.wanted is None else entry.wanted
    return f"{describe_writer(entry)}, who waits for {wanted} of them"


def _computes(pid: int) -> bool:
    """Whether a process has CUDA's device file open, as far as this user may see."""
    return _CUDA_OPENS in kernel.open_files(pid)


def _are_here(pids: Collection[int]) -> bool:
    return all(kernel.process_of(pid) == pid for pid in pids)


def _relatives(pids: Collection[int]) -> Iterator[int]:
    me = kernel.process_id()
    above = {me, *_ancestors(me)}
    for pid in pids:
        if pid in above or me in _ancestors(pid):
            yield pid


def _ancestors(pid: int) -> set[int]:
    """Who has started a process, and who has started that one; what is not shown ends it."""
    found: set[int] = set()
    parent = kernel.parent_of(pid)
    while parent is not None and parent not in found:
        found.add(parent)
        parent = kernel.parent_of(parent)
    return found
