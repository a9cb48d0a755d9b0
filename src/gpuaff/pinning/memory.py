"""The memory policy of the calling thread: set it, and put the earlier one back.

The kernel keeps a policy per thread, and only the thread itself can change it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpuaff._system import kernel, mempolicy
from gpuaff._system.mempolicy import Policy
from gpuaff.allocator.model import Share
from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.errors import GPUAffinityError, InvalidOptionError
from gpuaff.notices import Notice
from gpuaff.options import suggestion
from gpuaff.pinning.state import Placed
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import cpu_list

# ``set_affinity(memory=…)``: what was asked for.


WORDS = ("preferred", "bind", "interleave")

MAX_NODE_ID = 1023
"""The highest id of a NUMA node: the kernel can be built for no more."""

_OWN = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A memory policy as its user spelled it.

    Attributes:
        text: how it was said, for messages: ``memory='bind:8'``.
        word: ``preferred``, ``bind`` or ``interleave``.
        nodes: the NUMA nodes that were named.
        own: whether the memory of the rank's own GPU was named.
    """

    text: str
    word: str
    nodes: frozenset[int] = frozenset()
    own: bool = False

    @property
    def named(self) -> bool:
        """Whether nodes were named; else those of the share are meant."""
        return self.own or bool(self.nodes)


def read(name: str, value: object) -> Wanted:
    """Read a policy: a word, or a word and nodes (``bind:0-1``, ``interleave:0,gpu``).

    Args:
        name: what the option is called where it was said.
        value: what was said.

    Raises:
        InvalidOptionError: it is not that.
    """
    expected = f"one of {', '.join(WORDS)}, with or without nodes (bind:0-1, interleave:gpu)"
    if not isinstance(value, str):
        raise InvalidOptionError(name, value, expected)
    word, colon, listed = (part.strip() for part in value.partition(":"))
    if word not in WORDS:
        raise InvalidOptionError(name, value, expected + suggestion(word, WORDS))
    text = f"{name}={value!r}"
    if not colon:
        return Wanted(text=text, word=word)
    elements = [element.strip() for element in listed.split(",")]
    own, rest = _OWN in elements, [element for element in elements if element != _OWN]
    try:
        return Wanted(text=text, word=word, nodes=_nodes(rest) if rest else frozenset(), own=own)
    except ValueError as error:
        raise InvalidOptionError(name, value, f"{expected} ({error})") from None


def _nodes(elements: list[str]) -> frozenset[int]:
    if not all(elements):
        raise ValueError("a node is missing")
    nodes = parse_cpulist(",".join(elements))  # the kernel lists nodes as it lists CPUs
    if max(nodes) > MAX_NODE_ID:
        raise ValueError(f"{max(nodes)} is above the highest node id, {MAX_NODE_ID}")
    return nodes


# On which NUMA nodes a share's memory may lie. Pure.


def asked_for(wanted: Wanted, share: Share, topology: Topology) -> frozenset[int]:
    """The nodes that are meant: those that were named, or those of the share's CPUs.

    Raises:
        GPUAffinityError: a node was named that this machine does not have. That was spelled out
            for a machine of another kind, and something near it would not be what was meant.
    """
    if not wanted.named:
        return frozenset(share.numa_nodes)
    nodes = wanted.nodes | ({_own_memory(wanted, share, topology)} if wanted.own else set())
    there = {node.id for node in topology.numa_nodes or ()}
    if there and nodes - there:
        raise GPUAffinityError(
            f"{wanted.text}: this machine has no NUMA node {format_cpulist(nodes - there)}; "
            f"it has {format_cpulist(there)}"
        )
    return nodes


def _own_memory(wanted: Wanted, share: Share, topology: Topology) -> int:
    gpu = None if share.gpu is None else topology.gpu_by_index.get(share.gpu)
    if gpu is None or gpu.memory_node is None:
        raise GPUAffinityError(
            f"{wanted.text}: the memory of GPU {share.gpu} is not a NUMA node, as far as the "
            "driver tells (on a GH200 it is); name nodes, or none for those of the share"
        )
    return gpu.memory_node


def granted(
    asked: frozenset[int],
    topology: Topology,
    *,
    named: bool,
    allowed: frozenset[int],
    normal: frozenset[int] | None,
) -> frozenset[int]:
    """Those of the nodes that memory may come from.

    Args:
        asked: the nodes that are meant.
        topology: the machine.
        named: whether they were named. Otherwise the memory of a GPU, and other memory that the
            kernel may take only for what it can move away again, is left out.
        allowed: the nodes that the cpuset grants (cases A16, G10).
        normal: the nodes with memory of the ordinary kind; None when unknown.
    """
    empty = {node.id for node in topology.numa_nodes or () if node.has_memory is False}
    usable = (asked & allowed) - empty
    return usable if named or normal is None else usable & normal


def remarks(
    wanted: Wanted, asked: frozenset[int], usable: frozenset[int], allowed: frozenset[int]
) -> list[Notice]:
    """What is said where not all nodes can be had."""
    if not asked:
        text = f"{wanted.text}: the NUMA nodes of this rank's CPUs are not known"
        return [Notice("memory-none", f"{text}: the memory policy stays")]
    if usable == asked:
        return []
    lost = f"no memory for this process on NUMA node {format_cpulist(asked - usable)}"
    why = f"allowed are {format_cpulist(allowed) or 'none'}: cpuset.mems, docker --cpuset-mems"
    if not usable:
        text = f"{wanted.text}: {lost} ({why}): the memory policy stays"
        return [Notice("memory-none", text)]
    text = f"{wanted.text}: {lost} ({why}): node {format_cpulist(usable)} only"
    return [Notice("memory-cut", text)]


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
