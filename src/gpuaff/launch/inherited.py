"""Whether this process is a child that multiprocessing has started: it has its parent's variables.

DataLoader workers and those of ``torch.multiprocessing`` are such children.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gpuaff.notices import Notice
from gpuaff.system import environ, kernel


def maker() -> int | None:
    """The process by which multiprocessing has started this one; None where it has not.

    Nor while the child imports the script again: multiprocessing names it later.

    Nothing is imported for it: a child has the module, as it was started by it. Where another
    thread is just importing that, this is no child.
    """
    process = sys.modules.get("multiprocessing.process")
    parent = getattr(process, "parent_process", None)
    found = None if parent is None else parent()
    return None if found is None else int(found.pid)


def is_child() -> bool:
    """Whether multiprocessing has started this process, by whatever method."""
    return maker() is not None or imports_script()


def imports_script() -> bool:
    """Whether this process only imports the script again, before it does what it was made for.

    Spawned children do, and those of a fork server. It is what multiprocessing itself looks at, to
    refuse processes that are started there.
    """
    process = sys.modules.get("multiprocessing.process")
    current = getattr(process, "current_process", None)
    return current is not None and getattr(current(), "_inheriting", None) is True


IMPORTED = Notice(
    "imported-again",
    "multiprocessing imports this script again in a child, and so its claim is made again, inside "
    'the claim that the script has: put claim_gpus under `if __name__ == "__main__":`',
)
"""What to say where a claim fails there."""


def has_set(names: Iterable[str]) -> bool:
    """Whether one of these variables is not as this process's program was started with it.

    Then it was set since, as functions do that ``torch.multiprocessing.spawn`` starts: the numbers
    are the child's own. A forked child has its parent's program, and may have got from that what
    the parent has set since; that it looks the same as its own work costs no more than a remark.
    """
    began = kernel.variables_of(kernel.process_id())
    return bool(began) and any(environ.get(name) != began.get(name) for name in names)


def remark(rank: int, size: int) -> Notice:
    """What to say where such a child takes its parent's numbers for its own."""
    return Notice(
        "rank-inherited",
        f"multiprocessing has started this process, and the variables that make it rank {rank} of "
        f"{size} are its parent's: where several such children call set_affinity, they get the "
        "same CPUs; call set_affinity(local_rank, nproc_per_node) with numbers of their own",
        rank=rank,
    )
