"""How a machine's cores are cut: the words that users know from gpu_affinity.

Every enum also takes its strings (``mode="unique_contiguous"``).
"""

from __future__ import annotations

from enum import Enum


class Word(str, Enum):
    """An enum member that is, prints and compares as its string."""

    def __str__(self) -> str:
        return str(self.value)


class Mode(Word):
    """Which of the near cores a rank gets."""

    ALL = "all"
    """Every core near its GPU, shared with the other ranks there."""
    SINGLE = "single"
    """The first core near its GPU; several ranks may get the same one."""
    SINGLE_UNIQUE = "single_unique"
    """The first core near its GPU that no lower rank has."""
    UNIQUE_INTERLEAVED = "unique_interleaved"
    """An equal share of its own, every k-th of the near cores."""
    UNIQUE_CONTIGUOUS = "unique_contiguous"
    """An equal share of its own, one block of the near cores. The default."""
    CORE_COMPLEX = "core_complex"
    """A share as large as ``unique_contiguous`` has it, of whole L3 domains as far as it goes."""


class Scope(Word):
    """How far from the GPU a core may be and still be near."""

    NODE = "node"
    """The GPU's NUMA node."""
    SOCKET = "socket"
    """The GPU's package (socket), which may hold several NUMA nodes."""


class Multithreading(Word):
    """Which logical CPUs of a core are used."""

    ALL_LOGICAL = "all_logical"
    """All its allowed CPUs (hyperthreads)."""
    SINGLE_LOGICAL = "single_logical"
    """Its lowest allowed CPU only."""


class Partition(Word):
    """Among whom the CPUs are cut."""

    AUTO = "auto"
    """``job``; for GPUs that were claimed, ``machine``. The default."""
    JOB = "job"
    """Among the ranks of this job, which share all CPUs that they may use."""
    MACHINE = "machine"
    """Among all GPUs of the machine, by a fixed rule. Each rank stays inside the border of its
    GPU, so that jobs which know nothing of each other don't meet."""
