"""What each launcher's variables say of this process's place on its node. Pure."""

from __future__ import annotations

from gpuaff.launch.launchers import Launcher, Row, present, size_by
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice
from gpuaff.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one launcher says; both numbers are None where they name no rank.

    Attributes:
        row: the launcher.
        local_rank: the number on this node.
        local_size: how many there are on this node.
        rank_from: the variable that tells ``local_rank``.
        size_from: the one that tells ``local_size``.
        is_partial: whether only ``local_size`` is missing, as nobody tells it; ``told_rank`` is
            the number then.
        told_rank: the number on this node, whether or not ``local_size`` bears it out.
        why: what is wrong, where the numbers name no rank.
        remarks: what is assumed, where they do.
    """

    row: Row
    local_rank: int | None = None
    local_size: int | None = None
    rank_from: str
    size_from: str = ""
    is_partial: bool = False
    told_rank: int | None = None
    why: str = ""
    remarks: tuple[Notice, ...] = ()

    @property
    def place(self) -> tuple[int | None, int | None]:
        """Both numbers."""
        return self.local_rank, self.local_size


def all_said(get: Get) -> list[Said]:
    """What the launchers say whose variables are there, from the inside out."""
    return [_said(get, row) for row in present(get)]


def _said(get: Get, row: Row) -> Said:
    text, name = get(row.local_rank), row.local_rank
    rank = number(text)
    if rank is None:
        why = f"{name}={_shown(text)} is no number of a rank"
        return Said(row=row, rank_from=name, is_partial=not text, why=why)
    if row.launcher is Launcher.TORCHRUN and rank == 0:
        rank, name = _virtual(get) or (rank, name)
    if row.local_size is None or not get(row.local_size):
        return _without_size(get, row, rank)
    size = size_by(get, row)
    size_text = f"{row.local_size}={_shown(get(row.local_size))}"
    if not size:
        also = f" with SLURM_NODEID={_shown(get('SLURM_NODEID'))}" if _is_srun(row) else ""
        why = f"{size_text}{also} tells no number of processes here"
    elif rank >= size:
        here = f" ({size} on this node)" if _is_srun(row) else ""
        why = f"{name}={rank} is not below {size_text}{here}"
    else:
        return Said(
            row=row,
            local_rank=rank,
            local_size=size,
            told_rank=rank,
            rank_from=name,
            size_from=row.local_size,
        )
    return Said(row=row, rank_from=name, told_rank=rank, why=why)


def _is_srun(row: Row) -> bool:
    return row.launcher is Launcher.SLURM


def _without_size(get: Get, row: Row, rank: int) -> Said:
    """A job of one process has one here.

    Flux tells how many processes and nodes the job has, and spreads them evenly.
    """
    name = row.size or ""
    size, nodes = number(get(name)), number(get(row.nodes or ""))
    if (rank, size) == (0, 1):
        return Said(
            row=row,
            local_rank=0,
            local_size=1,
            told_rank=0,
            rank_from=row.local_rank,
            size_from=name,
        )
    if row.local_size is not None or not size or not nodes:
        lacks = row.local_size or f"{row.size} or {row.nodes}"
        why = f"{row.local_rank}={rank} is set, and {lacks} does not tell how many there are here"
        return Said(row=row, rank_from=row.local_rank, told_rank=rank, is_partial=True, why=why)
    most = -(-size // nodes)
    if rank >= most:
        why = (
            f"{row.local_rank}={rank} is more than {row.size}={size} processes on "
            f"{row.nodes}={nodes} nodes allow, when they are spread evenly"
        )
        return Said(row=row, rank_from=row.local_rank, told_rank=rank, is_partial=True, why=why)
    return Said(
        row=row,
        local_rank=rank,
        local_size=most,
        told_rank=rank,
        rank_from=row.local_rank,
        size_from=name,
        remarks=() if nodes == 1 else (_spread(row, size, nodes, most, rank),),
    )


def _spread(row: Row, size: int, nodes: int, most: int, rank: int) -> Notice:
    return Notice(
        "size-assumed",
        f"{row.launcher.value} does not tell how many of its {size} processes are on this node; "
        f"on {nodes} nodes, evenly, it is {most}: where they are spread otherwise, call "
        "set_affinity(local_rank, nproc_per_node)",
        rank=rank,
    )


def _virtual(get: Get) -> tuple[int, str] | None:
    """The place that ``torchrun --virtual-local-rank`` hides.

    It sets LOCAL_RANK=0 for each, and shows each the GPU of its place alone. RANK counts on from
    node to node, by GROUP_RANK.
    """
    rank, size = number(get("RANK")), number(get("WORLD_SIZE"))
    here = number(get("LOCAL_WORLD_SIZE"))
    if rank is None or not here or "," in (get("CUDA_VISIBLE_DEVICES") or ","):
        return None
    group = 0 if size == here else number(get("GROUP_RANK"))
    groups = 1 if size == here else number(get("GROUP_WORLD_SIZE"))
    if group is None or groups is None or size != groups * here:
        return None
    place = rank - group * here
    return (place, "RANK") if 0 < place < here else None


def _shown(text: str | None) -> str:
    """A value as it is quoted; a long one is cut."""
    if text is None:
        return "(unset)"
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
