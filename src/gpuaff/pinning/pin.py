"""A call of ``set_affinity``: arguments, observation, plan, and the change of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.allocator.model import Options, Partition, Plan, Share, check_rank, given_options
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import counted
from gpuaff.launch import inherited
from gpuaff.launch.binding import Masks, classify_masks, consistency, observe_ancestry, own_gpus
from gpuaff.launch.inherited import PINNED_VARIABLE, Pinned, classify_pinned
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.ranks import ranks as launched_ranks
from gpuaff.notices import Notice, one_reason
from gpuaff.options import count, flag, misspelt_variables
from gpuaff.pinning import threads
from gpuaff.pinning.openmp import binding_notices, set_thread_count
from gpuaff.pinning.rank_plan import plan_for_rank, plan_inside_share
from gpuaff.pinning.restore import Affinity, put_extras_back, rewind
from gpuaff.pinning.state import (
    Process,
    UnavailableError,
    log,
    place,
    refusal,
    refuse_if_broken,
    say,
    this_process,
    transaction,
    try_twice,
    unsupported_reason,
)
from gpuaff.topology.live import gpus_of_the_machine, observe
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import cpuset_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.pinning.memory import MemoryOption


_ABOUT_RANKS = frozenset({"no-rank", "ranks-contradict", "ranks-stale"})
"""They say already that other ranks may be on this node."""


def pin(
    local_rank: int | None,
    nproc_per_node: int | None,
    end_prewarm: Callable[[], None],
    *,
    strict: bool | None,
    memory: str | None,
    openmp: bool | None,
    **arguments: object,
) -> Affinity:
    """See :func:`gpuaff.set_affinity`; ``end_prewarm`` is called when the driver is done with."""
    strict, ranks = _flag("strict", strict), _ranks(local_rank, nproc_per_node)
    options = Options.of(ranks.local_size, **given_options(arguments, env.option))
    memory_option, openmp = _memory_option(memory), _flag("openmp", openmp)
    remarks, why = ranks.warnings, unsupported_reason()
    is_bad = any(notice.code == "bad-rank" for notice in remarks)
    rank = None if is_bad else ranks.local_rank
    if rank is None or why is not None:
        return _unpinned(rank, remarks if why is None else (why,), strict=strict)
    claim, unreadable = inherited.claim_in_environment()
    if claim is not None and options.partition is Partition.AUTO:
        # Other jobs' claims have other GPUs, and so other CPUs.
        options = options._replace(partition=Partition.MACHINE)
    if claim is not None and claim.pid == os.getpid():  # it is alone on its GPUs
        remarks = tuple(notice for notice in remarks if notice.code != "no-rank")
    if _ABOUT_RANKS.isdisjoint(notice.code for notice in remarks):
        remarks += consistency(ranks)
    if unreadable is not None:
        remarks += (unreadable,)
    remarks += misspelt_variables(env.names("GPUAFF_"))
    attempt = Attempt(
        ranks, remarks, options, memory_option, openmp, strict, end_prewarm, claim is not None
    )
    found = try_twice(attempt.run)
    if isinstance(found, UnavailableError):
        return _unpinned(rank, found.warnings + remarks, strict=strict, plan=found.plan)
    return found


def _ranks(local_rank: int | None, nproc_per_node: int | None) -> Ranks:
    if local_rank is None and nproc_per_node is None:
        return launched_ranks()
    if local_rank is None or nproc_per_node is None:
        missing = "local_rank" if local_rank is None else "nproc_per_node"
        raise TypeError(
            f"set_affinity() needs {missing} too: give both numbers, or neither to take "
            "the launcher's (gpuaff.ranks())"
        )
    size = count("nproc_per_node", nproc_per_node)
    return Ranks(local_rank=check_rank(local_rank, size), local_size=size)


def _memory_option(argument: object) -> MemoryOption | None:
    text = env.option("memory") if argument is None else None
    if argument is None and text is None:
        return None
    from gpuaff.pinning.memory import parse_memory  # only where it is requested

    return parse_memory("memory" if text is None else "GPUAFF_MEMORY", text or argument)


def _flag(option: str, argument: object) -> bool:
    """A flag that is off by default: the argument, else ``GPUAFF_<OPTION>``."""
    if argument is not None:
        return flag(option, argument)
    text = env.option(option)
    return text is not None and flag(f"GPUAFF_{option.upper()}", text, text=True)


def _unpinned(
    rank: int | None, warnings: Sequence[Notice], *, strict: bool, plan: Plan | None = None
) -> Affinity:
    if strict:
        refuse_if_broken(warnings)
    affinity = Affinity(threads.current(), rank=rank, plan=plan, warnings=warnings)
    say(warnings, rank=rank)
    _log_where(affinity, None)
    return affinity


def _log_where(affinity: Affinity, share: Share | None) -> None:
    """The one line for each call: ``rank 3 -> GPU 3 (NUMA 1) cpus 48-55,176-183 [8 cores]``."""
    rank, cpus = affinity.rank, format_cpulist(affinity) or "unknown"
    if share is None:
        log("info", f"{'' if rank is None else f'rank {rank} '}not pinned: cpus {cpus}")
        return
    nodes = ",".join(map(str, share.numa_nodes)) or "?"
    memory = f" memory {affinity.memory}" if affinity.memory else ""
    where = f"GPU {share.gpu} (NUMA {nodes}) cpus {cpus} [{counted(share.cores, 'core')}]"
    log("info", f"rank {rank} -> {where}{memory}")


class Observation(NamedTuple):
    """What an attempt has found."""

    granted: threads.Granted
    topology: Topology
    masks: Masks
    parent: CpuSet | None  # the CPUs that the parent may use; None when unknown
    share: Pinned | None  # the one that this process was started with, if it has no other CPUs
    is_own: bool  # whether that is this rank's


class Attempt(NamedTuple):
    """The checked arguments of a call."""

    ranks: Ranks
    remarks: tuple[Notice, ...]  # warnings found before the attempt
    options: Options
    memory: MemoryOption | None
    openmp: bool
    strict: bool
    end_prewarm: Callable[[], None]
    in_claim: bool  # whether a claim is around this process, which may have narrowed its mask

    def run(self) -> Affinity:
        """Pin this process, and log where to. UnavailableError is raised where it cannot be."""
        process, rank = this_process(), self.ranks.local_rank
        with transaction(process, memory=self.memory is not None):
            before = process.state
            seen = self._observe(process)
            self.end_prewarm()
            visible = len(seen.topology.visible)
            no_rank = next((one for one in self.ranks.warnings if one.code == "no-rank"), None)
            if no_rank is not None and visible > 1:  # it may start the ranks itself
                others = [one for one in self.remarks if one is not no_rank]
                others += [*_of_topology(seen.topology), no_rank]
                return _unpinned(None, others, strict=self.strict)
            plan = self._plan(seen)
            share, warnings = plan.share_of(rank), self._warnings(process, seen, plan)
            pinned = share.gpu is not None and bool(share.cpus)
            # What earlier calls have set is put back first, so that twice is the same as once.
            warnings += put_extras_back(process, before.first)
            if pinned:
                self._put_into_force(process, seen, plan, warnings)
            elif before.share is not None:
                warnings += rewind(process, before.first)
            if self.strict:
                refuse_if_broken(warnings)
            policy, own = process.state.memory, threading.get_native_id()
            affinity = Affinity(
                kernel.get_affinity(),
                rank=rank,
                plan=plan,
                pinned=pinned,
                states=(before, process.state),
                memory=str(policy.ours) if policy and policy.thread == own else None,
                warnings=(*self.remarks, *warnings),
            )
            say(affinity.warnings, rank=rank)
            _log_where(affinity, share if pinned else None)
            return affinity

    def _observe(self, process: Process) -> Observation:
        """See what the kernel grants of the original mask by now, and look around."""
        granted = threads.granted(process.state.original)
        above = observe_ancestry(self.ranks)
        machine_wide = self.options.partition is Partition.MACHINE
        with interruptible():  # the driver may hang
            topology = observe(links=False, accelerators=machine_wide, allowed=granted.cpus)
        masks = classify_masks(
            self.ranks,
            own=granted.cpus,
            above=above,
            online=topology.cpus,
            cpuset=lambda: cpuset_of(kernel.machine_tree()),
        )
        first = process.state.variables.get(PINNED_VARIABLE)
        get = env.get if first is None else {PINNED_VARIABLE: first[0]}.get
        share = classify_pinned(get, granted.cpus)
        here = self.ranks.local_rank, self.ranks.local_size
        is_own = share is not None and (share.local_rank, share.local_size) == here
        return Observation(granted, topology, masks, above.parent, share, is_own)

    def _plan(self, seen: Observation) -> Plan:
        topology, visible = seen.topology, len(seen.topology.visible)
        gpus = own_gpus(self.ranks, visible=visible, is_rank=seen.is_own)
        if seen.share is not None and seen.is_own and visible:
            return plan_inside_share(topology, self.options, self.ranks, gpus, seen.share)
        all_gpus = () if gpus is None else gpus_of_the_machine(topology)
        return plan_for_rank(topology, self.options, self.ranks, seen.masks, gpus, all_gpus)

    def _warnings(self, process: Process, seen: Observation, plan: Plan) -> list[Notice]:
        rank, size, share = self.ranks.local_rank, self.ranks.local_size, seen.share
        found = _of_topology(seen.topology)
        found += dict.fromkeys(one for one in plan.warnings if one.rank in (None, rank))
        if not seen.masks.bound:
            found += _mask_shrunk(seen.topology, seen.parent)
        explained: frozenset[str] = frozenset()
        if self.in_claim or process.state.grant is not None:  # it has narrowed the mask
            explained = frozenset({"mask-narrow", "mask-shrunk"})
        if share is not None and seen.is_own and seen.granted.cpus == share.cpus:
            explained |= {"mask-narrow", "mask-shrunk", "masks-unknown"}
        warnings = [notice for notice in one_reason(found) if notice.code not in explained]
        # One rank on the only GPU has all of its CPUs: the ranks that share the GPU share these.
        is_whole = share and (share.local_size, len(seen.topology.visible)) == (1, 1)
        if share is None or seen.is_own or is_whole:
            return warnings
        return [inherited.share_inherited(share, rank, size), *warnings]  # the cause comes first

    def _put_into_force(
        self, process: Process, seen: Observation, plan: Plan, warnings: list[Notice]
    ) -> None:
        """Set memory and OMP_NUM_THREADS, and move all threads; add to the warnings."""
        share, state = plan.share_of(self.ranks.local_rank), process.state
        if self.memory is not None:  # before the CPUs: binding memory may move threads (C11)
            change, found = self.memory.apply(share, seen.topology)
            process.update(memory=change or process.state.memory)
            warnings += found
        if self.openmp:
            warnings += set_thread_count(process, share.cores, self.ranks.local_size)
        warnings += binding_notices()
        try:
            got, found = place(process, share.cpus, state.is_free(seen.granted))
        except OSError as error:
            raise UnavailableError([*warnings, refusal(error, share.cpus)], plan) from error
        warnings += found
        process.update(reserved=share.reserved)
        pinned = Pinned(self.ranks.local_rank, self.ranks.local_size, got, share.reserved)
        process.set_variable(PINNED_VARIABLE, str(pinned))


def _of_topology(topology: Topology) -> list[Notice]:
    """How the machine was read; the planner passes on what concerns visible devices."""
    return [note for note in topology.notes if not note.code.startswith("visible-")]


def _mask_shrunk(topology: Topology, parent: CpuSet | None) -> list[Notice]:
    """Warn of one core of the parent's: a border looks like a runtime's doing (cases C5, C7)."""
    allowed = topology.allowed
    one_core = len(allowed) == 1 or any(allowed <= core for core in topology.cores or ())
    if parent is None or parent <= allowed or not one_core:
        return []
    text = (
        f"this process may use CPUs {format_cpulist(allowed)} only, its parent "
        f"{format_cpulist(parent)}. If no launcher has set that, an OpenMP runtime or a BLAS did "
        "on import (OMP_PROC_BIND, KMP_AFFINITY, GOMP_CPU_AFFINITY; OPENBLAS_MAIN_FREE=1 and "
        "KMP_AFFINITY=disabled prevent it): call gpuaff before importing it"
    )
    return [Notice("mask-shrunk", text)]
