"""The memory policy of the calling thread: set it, and put the earlier one back.

The kernel keeps a policy per thread, and only the thread itself can change it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress

from gpuaff.allocator.plan import Share
from gpuaff.binding.memory_nodes import asked_for, granted, remarks
from gpuaff.binding.memory_option import Wanted
from gpuaff.binding.process import Placed
from gpuaff.cpuset import format_cpulist
from gpuaff.notices import Notice
from gpuaff.system import kernel, mempolicy
from gpuaff.system.mempolicy import Policy
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import cpu_list

_MODES = {
    "preferred": mempolicy.PREFERRED,
    "bind": mempolicy.BIND,
    "interleave": mempolicy.INTERLEAVE,
}


def place(wanted: Wanted, share: Share, topology: Topology) -> tuple[Placed | None, list[Notice]]:
    """Let the calling thread's memory come from the nodes that are meant.

    Returns:
        What was set, None when nothing was; and what is to be said.

    Raises:
        GPUAffinityError: a node was named that this machine does not have.
    """
    asked = asked_for(wanted, share, topology)
    try:
        first, allowed = mempolicy.get_policy(), mempolicy.allowed_nodes()
        normal = cpu_list(kernel.machine_tree(), "sys/devices/system/node/has_normal_memory")
        usable = granted(asked, topology, named=wanted.named, allowed=allowed, normal=normal)
        notices = remarks(wanted, asked, usable, allowed)
        if not usable:
            return None, notices
        notices += _set(wanted.word, usable, _nearest(share, topology))
        return Placed(first=first, ours=mempolicy.get_policy()), notices
    except OSError as error:
        return None, [_refused(wanted, error)]


def _nearest(share: Share, topology: Topology) -> int | None:
    return None if share.gpu is None else topology.gpu_by_index[share.gpu].numa_node


def _set(word: str, nodes: frozenset[int], nearest: int | None) -> list[Notice]:
    if word != "preferred" or len(nodes) == 1:
        mempolicy.set_policy(Policy(_MODES[word] | mempolicy.STATIC, nodes))
        return []
    try:
        mempolicy.set_policy(Policy(mempolicy.PREFERRED_MANY | mempolicy.STATIC, nodes))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _set_one(nodes, nearest)
    return []


def _set_one(nodes: frozenset[int], nearest: int | None) -> list[Notice]:
    """Before Linux 5.15 only one node can be preferred."""
    one = nearest if nearest in nodes else min(nodes)
    mempolicy.set_policy(Policy(mempolicy.PREFERRED | mempolicy.STATIC, frozenset({one})))
    text = (
        f"this kernel can prefer one NUMA node only: it is {one} of {format_cpulist(nodes)} "
        "(Linux 5.15 can prefer several)"
    )
    return [Notice("memory-first", text)]


def _refused(wanted: Wanted, error: OSError) -> Notice:
    if error.errno == errno.ENOSYS:
        why = f"there are no memory policies here ({error.strerror}; a kernel without NUMA?)"
    else:
        why = (
            f"the kernel refused a memory policy ({error.strerror}); in a container a seccomp "
            "filter does it, and docker run --cap-add SYS_NICE lifts it"
        )
    text = f"{wanted.text}: {why}. The memory policy stays as it was"
    return Notice("memory-refused", text)


def rewind(
    placed: Mapping[int, Placed], to: Mapping[int, Placed]
) -> tuple[Mapping[int, Placed], list[Notice]]:
    """Put the calling thread's policy back to what it was.

    A policy that somebody else has set since stays.

    Args:
        placed: what is set now, by thread.
        to: what was set then.

    Returns:
        What is set afterwards, and what is to be said: other threads keep their policy.
    """
    own, alive = kernel.thread_id(), kernel.thread_ids()
    notices = back(placed.get(own), to.get(own))
    left = {
        tid: kept for tid, kept in placed.items() if tid != own and (alive is None or tid in alive)
    }
    notices += [_left(tid, kept) for tid, kept in left.items() if to.get(tid) != kept]
    return {**left, **({own: to[own]} if own in to else {})}, notices


def back(now: Placed | None, then: Placed | None) -> list[Notice]:
    """Put the calling thread's policy back to what it was then."""
    if now is not None and now != then:
        return _swap(now.ours, then.ours if then is not None else now.first)
    if then is not None and now is None:  # a call that set none had put the first one back
        return _swap(then.first, then.ours)
    return []


def inherited(placed: Mapping[int, Placed]) -> Placed | None:
    """What this thread has from the thread, or process, that started it; None when that is none."""
    with suppress(OSError):
        now = mempolicy.get_policy()
        return next((one for one in placed.values() if one.ours == now), None)
    return None


def shed(placed: Mapping[int, Placed], to: Mapping[int, Placed]) -> list[Notice]:
    """Put back, as :func:`rewind`, a policy that this thread has from whoever started it."""
    found = inherited(placed)
    then = next((to.get(tid) for tid, one in placed.items() if one == found), None)
    return back(found, then)


def taken_down() -> Callable[[], None]:
    """Take down the calling thread's policy, whoever has set it; what puts back exactly that."""
    try:
        then = mempolicy.get_policy()
    except OSError:  # nobody can set one then
        return lambda: None

    def put_back() -> None:
        with suppress(OSError):  # a seccomp filter
            if mempolicy.get_policy() != then:
                mempolicy.set_policy(then)

    return put_back


def _swap(expected: Policy, wanted: Policy) -> list[Notice]:
    """Set a policy where another one is in force."""
    try:
        if mempolicy.get_policy() == expected:
            mempolicy.set_policy(wanted)
    except OSError as error:
        why = f"the kernel refused the earlier memory policy, {wanted} ({error.strerror})"
        return [Notice("memory-not-restored", f"{why}: {expected} stays")]
    return []


def _left(tid: int, placed: Placed) -> Notice:
    return Notice(
        "memory-not-restored",
        f"thread {tid} keeps the memory policy {placed.ours}: only that thread can change it; "
        "call restore() there",
    )
