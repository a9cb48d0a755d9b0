"""``set_affinity(memory=…)``: the memory policy of the calling thread.

The kernel keeps a policy per thread, and only the thread itself can change it. What threads and
children have inherited is put back by value: where the policy is still gpuaff's.
"""

from __future__ import annotations

import errno
import threading
from typing import NamedTuple

from gpuaff._system import kernel, mempolicy
from gpuaff._system.mempolicy import Policy
from gpuaff.allocator.model import Share
from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.errors import GPUAffinityError, InvalidOptionError
from gpuaff.notices import Notice
from gpuaff.options import suggestion
from gpuaff.pinning.state import way_back
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import cpu_list

_MODES = {
    "preferred": mempolicy.PREFERRED,
    "bind": mempolicy.BIND,
    "interleave": mempolicy.INTERLEAVE,
}


class Change(NamedTuple):
    """A policy that gpuaff has set: the thread's own before, gpuaff's, and the thread's id."""

    before: Policy
    ours: Policy
    thread: int


class MemoryOption(NamedTuple):
    """A memory policy as its user spelled it."""

    text: str  # for messages: ``memory='bind:8'``
    word: str
    nodes: frozenset[int] = frozenset()
    own: bool = False  # whether the memory of the rank's own GPU is named (``gpu``)

    @property
    def named(self) -> bool:
        """Whether nodes are named; else those of the share are used."""
        return self.own or bool(self.nodes)

    def apply(self, share: Share, topology: Topology) -> tuple[Change | None, list[Notice]]:
        """Set the calling thread's policy: what was set, None for nothing; and the warnings."""
        try:
            first, allowed = mempolicy.get_policy(), mempolicy.allowed_nodes()
            normal = cpu_list(kernel.machine_tree(), "sys/devices/system/node/has_normal_memory")
            usable, notices = usable_nodes(
                self, share, topology, allowed=allowed, normal=normal or None
            )
            if not usable:
                return None, notices
            nearest = None if share.gpu is None else topology.gpu_by_index[share.gpu].numa_node
            notices += set_mode(self.word, usable, nearest)
            return Change(first, mempolicy.get_policy(), threading.get_native_id()), notices
        except OSError as error:
            why = "in a container a seccomp filter does so, unless started with --cap-add SYS_NICE"
            if error.errno == errno.ENOSYS:
                why = "it has none, as one built without NUMA"
            text = f"{self.text}: the kernel refused a memory policy ({error.strerror}): {why}"
            return None, [Notice("memory-refused", f"{text}. The memory policy stays as it was")]


def parse_memory(name: str, value: object) -> MemoryOption:
    """Parse a word, or a word and nodes (``bind:0-1``); ``name`` is the option's, for messages."""
    expected = f"one of {', '.join(_MODES)}, with or without nodes (bind:0-1, interleave:gpu)"
    if not isinstance(value, str):
        raise InvalidOptionError(name, value, expected)
    word, colon, listed = (part.strip() for part in value.partition(":"))
    if word not in _MODES:
        raise InvalidOptionError(name, value, expected + suggestion(word, _MODES))
    elements = [element.strip() for element in listed.split(",")] if colon else []
    ids = [element for element in elements if element != "gpu"]
    try:
        nodes = parse_cpulist(",".join(ids)) if ids else frozenset()
    except ValueError as error:
        raise InvalidOptionError(name, value, f"{expected} ({error})") from None
    if not all(elements):
        raise InvalidOptionError(name, value, f"{expected} (a node is missing)")
    return MemoryOption(f"{name}={value!r}", word, nodes, own="gpu" in elements)


def usable_nodes(
    option: MemoryOption,
    share: Share,
    topology: Topology,
    *,
    allowed: frozenset[int],
    normal: frozenset[int] | None,
) -> tuple[frozenset[int], list[Notice]]:
    """The nodes that memory may come from, and a warning where not all requested ones are. Pure.

    ``allowed`` are the nodes that the cpuset grants (cases A16, G10). ``normal`` have memory that
    the kernel uses for everything, not that of a GPU; None when unknown. Others must be named.
    """
    requested = _named_nodes(option, share, topology) or frozenset(share.numa_nodes)
    empty = {node.id for node in topology.numa_nodes or () if node.has_memory is False}
    usable = (requested & allowed) - empty
    if normal is not None and not option.named:
        usable &= normal
    if requested and usable == requested:
        return usable, []
    effect = f"node {format_cpulist(usable)} only" if usable else "the memory policy stays"
    why = (
        f"no memory for this process on NUMA node {format_cpulist(requested - usable)} (allowed "
        f"are {format_cpulist(allowed) or 'none'}: cpuset.mems, docker --cpuset-mems)"
    )
    if not requested:
        why = "the NUMA nodes of this rank's CPUs are unknown"
    text = f"{option.text}: {why}: {effect}"
    return usable, [Notice("memory-cut" if usable else "memory-none", text)]


def _named_nodes(option: MemoryOption, share: Share, topology: Topology) -> frozenset[int]:
    nodes = option.nodes
    if option.own:
        gpu = None if share.gpu is None else topology.gpu_by_index.get(share.gpu)
        if gpu is None or gpu.memory_node is None:
            raise GPUAffinityError(
                f"{option.text}: the memory of GPU {share.gpu} is not a NUMA node, according to "
                "the driver (on a GH200 it is one); name nodes, or none for those of the share"
            )
        nodes |= {gpu.memory_node}
    # One that this machine does not have was meant for another machine: no other can replace it.
    there = {node.id for node in topology.numa_nodes or ()}
    if there and nodes - there:
        raise GPUAffinityError(
            f"{option.text}: this machine has no NUMA node {format_cpulist(nodes - there)}; "
            f"it has {format_cpulist(there)}"
        )
    return nodes


# The calling thread's policy.


def set_mode(word: str, nodes: frozenset[int], nearest: int | None) -> list[Notice]:
    """Set a policy; before Linux 5.15 only one node can be preferred, then the nearest is."""
    several = word == "preferred" and len(nodes) > 1
    mode = mempolicy.PREFERRED_MANY if several else _MODES[word]
    try:
        mempolicy.set_policy(Policy(mode | mempolicy.STATIC, nodes))
    except OSError as error:
        if not several or error.errno != errno.EINVAL:
            raise
        one = nearest if nearest in nodes else min(nodes)
        mempolicy.set_policy(Policy(mempolicy.PREFERRED | mempolicy.STATIC, frozenset({one})))
        text = (
            f"this kernel can prefer one NUMA node only: {one} of {format_cpulist(nodes)} is "
            "preferred (Linux 5.15 and later can prefer several)"
        )
        return [Notice("memory-first", text)]
    return []


def rewind_policy(now: Change | None, to: Change | None) -> tuple[Change | None, list[Notice]]:
    """Put the calling thread's policy back; what is set afterwards, and warnings."""
    notices = put_policy_back(now, to)
    if now in (None, to) or now.thread == threading.get_native_id():
        return to, notices
    ids = kernel.thread_ids()
    if ids is not None and now.thread not in ids:  # it has ended
        return to, notices
    why = f"thread {now.thread} keeps the memory policy {now.ours}: only that thread can change it"
    return now, [*notices, Notice("memory-not-restored", f"{why}; call restore() there")]


def put_policy_back(now: Change | None, then: Change | None) -> list[Notice]:
    """Put the calling thread's policy back to what it was then, if gpuaff's is in force."""
    way = way_back(now and (now.before, now.ours), then and (then.before, then.ours))
    if way is None:
        return []
    expected, wanted = way
    try:
        if mempolicy.get_policy() == expected:
            mempolicy.set_policy(wanted)
    except OSError as error:
        why = f"the kernel refused the earlier memory policy, {wanted} ({error.strerror})"
        return [Notice("memory-not-restored", f"{why}: {expected} stays")]
    return []
