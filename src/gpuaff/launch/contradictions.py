"""Which launcher counts where several have left variables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuaff.launch import slurm
from gpuaff.launch.launchers import BY_PROGRAM, Launcher
from gpuaff.launch.said import Said
from gpuaff.launch.variables import Get
from gpuaff.notices import Notice


def settle(
    told: Sequence[Said], above: Callable[[], tuple[str, ...]]
) -> tuple[Said | None, Notice | None]:
    """The launcher that counts, and what to say where others contradict it.

    Args:
        told: what each says, from the inside out.
        above: gives the names of the programs above this process, the nearest first.
    """
    told = _completed(told)
    if not told:
        return None, None
    first, last = told[0], told[-1]
    is_outside = len(told) == 2 and first.local_size == 1 < (last.local_size or 1)
    if is_outside and last.row.launcher is Launcher.UNKNOWN:
        return last, None  # the one process has started others
    against = [one for one in told[1:] if _contradicts(one, first)]
    if not against or not first.row.programs:
        return first, _contradiction(first, against, is_above=None) if _matters(against) else None
    nearest = next((BY_PROGRAM[name] for name in above() if name in BY_PROGRAM), None)
    if nearest is first.row.launcher:
        left = [one for one in against if one.row.launcher is Launcher.UNKNOWN]
        return first, _contradiction(first, left, is_above=nearest) if left else None
    chosen = next((one for one in against if one.row.launcher is nearest), None)
    if chosen is not None:
        return chosen, _contradiction(chosen, [first], is_above=nearest)
    return first, _contradiction(first, against, is_above=None)


def _completed(told: Sequence[Said]) -> list[Said]:
    """Without those who lack a number that somebody else tells of the same rank.

    LOCAL_RANK alone is set by many scripts; beside a launcher's numbers it tells nothing new.
    """
    return [one for one in told if not (one.is_partial and _is_told(one, told))]


def _is_told(part: Said, told: Sequence[Said]) -> bool:
    others = [one for one in told if one is not part and one.local_rank is not None]
    if part.row.launcher is Launcher.UNKNOWN:
        return bool(others)
    if not part.row.programs:
        return False  # it starts children of another launcher's process
    return any(one.local_rank == part.told_rank for one in others)


def _contradicts(one: Said, first: Said) -> bool:
    """Whether it tells of several processes here, and of another place for this one.

    A launcher that has started one process here has started another launcher.
    """
    if one.local_size is None or one.place == first.place:
        return False
    return one.local_size > 1 or one.row.launcher is Launcher.UNKNOWN


def _matters(against: Sequence[Said]) -> bool:
    """Launchers around torchrun are no contradiction; :mod:`gpuaff.launch.beside` tells of them."""
    return any(one.row.launcher is Launcher.UNKNOWN for one in against)


def _contradiction(counts: Said, against: Sequence[Said], *, is_above: Launcher | None) -> Notice:
    other = against[0]
    why = (
        f"{is_above.value} has started this process, and the others are left over"
        if is_above is not None
        else f"{counts.row.launcher.value} mostly runs inside the others"
    )
    return Notice(
        "ranks-contradict",
        f"{_place(counts)}, and {_place(other)}: the first counts, as {why}; unset what is left "
        "over, or call set_affinity(local_rank, nproc_per_node)",
        rank=counts.local_rank,
    )


def _place(said: Said) -> str:
    where = f"{said.rank_from}, {said.size_from}" if said.size_from else said.rank_from
    if said.local_rank is None:
        return f"{where} name no rank"
    return f"{where} tell of rank {said.local_rank} of {said.local_size}"


def left_by_slurm(
    get: Get,
    told: Sequence[Said],
    host: str | None,
    above: Callable[[], tuple[str, ...]],
    cgroup: Callable[[], str] = str,
) -> Notice | None:
    """What to say where srun's variables are those of a step on other machines.

    A shell that was opened from a step (ssh with the environment, tmux, a container) keeps them. A
    node's name in Slurm need not be its host's, so a step's daemon above this process proves that
    they are right. So does the step's cgroup, where the daemon cannot be seen: /proc may hide
    root's processes (``hidepid``), as a container may.
    """
    if host is None or all(one.row.launcher is not Launcher.SLURM for one in told):
        return None
    from gpuaff.launch import slurm_nodes  # nobody else needs regular expressions to pin

    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        nodes = get(name)
        if not nodes:
            continue
        if slurm_nodes.holds(nodes, host) is not False or "slurmstepd" in above():
            return None
        if slurm.is_cgroup_of_step(get, cgroup()):
            return None
        return Notice(
            "ranks-stale",
            f"{name}={nodes[:80]} does not name this machine, {host}, and no step of Slurm is "
            "above this process: srun's variables are left over and do not count; unset them, or "
            "in a container that has another host name, call set_affinity(local_rank, "
            "nproc_per_node)",
        )
    return None
