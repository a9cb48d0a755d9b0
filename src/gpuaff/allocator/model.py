"""The options of a plan, and the plan. Enums also take their strings (``mode="single"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from typing import NamedTuple

from gpuaff import options
from gpuaff.cpuset import MAX_CPU_ID, CpuSet, format_cpulist
from gpuaff.errors import InvalidOptionError
from gpuaff.notices import Notice
from gpuaff.topology.model import Source
from gpuaff.topology.model import Word as Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
    """A share of the size of ``unique_contiguous``, of whole L3 domains as far as possible."""


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
    """Among which ranks or GPUs the CPUs are cut."""

    AUTO = "auto"
    """``job``; for GPUs that were claimed, ``machine``. The default."""
    JOB = "job"
    """Among the ranks of this job, which share all CPUs that they may use."""
    MACHINE = "machine"
    """Among all GPUs of the machine, by a fixed rule. Each rank stays inside the domain of its
    GPU, so that jobs which know nothing of each other get different CPUs."""


class Options(NamedTuple):
    """The options of a plan, validated; :func:`gpuaff.plan` documents them."""

    nproc: int
    mode: Mode = Mode.UNIQUE_CONTIGUOUS
    scope: Scope = Scope.NODE
    multithreading: Multithreading = Multithreading.ALL_LOGICAL
    balanced: bool = True
    min_physical_cores: int | None = None  # None also where the mode ignores it
    max_physical_cores: int | None = None
    partition: Partition = Partition.AUTO
    cpus: CpuSet | None = None
    reserve: int = 0
    rank_allowed: tuple[CpuSet, ...] | None = None

    @classmethod
    def of(cls, nproc: object, **given: object) -> Options:
        """Check what a caller gave. What is invalid raises, also where pinning is best effort."""
        ranks = options.count("nproc", nproc)
        masks = given.pop("rank_allowed", None)
        found: dict[str, Any] = {name: READERS[name](name, value) for name, value in given.items()}
        rank_allowed = None if masks is None else _check_masks(masks, ranks)
        made = cls(nproc=ranks, rank_allowed=rank_allowed, **found)
        least, most = made.min_physical_cores, made.max_physical_cores
        if least is not None and most is not None and least > most:
            expected = f"at most max_physical_cores={most}"
            raise InvalidOptionError("min_physical_cores", least, expected)
        if made.is_single:
            return made._replace(min_physical_cores=None, max_physical_cores=None)
        return made

    @property
    def is_single(self) -> bool:
        """Whether each rank gets one core, whatever the limits are."""
        return self.mode in (Mode.SINGLE, Mode.SINGLE_UNIQUE)


def check_rank(rank: object, nproc: int, *, name: str = "local_rank") -> int:
    """A rank of ``nproc`` processes, as an int; ``name`` is what the caller calls the argument."""
    expected = f"a whole number from 0 to {nproc - 1}, as there are {nproc} processes"
    return options.count(name, rank, least=0, most=nproc - 1, expected=expected)


def _check_masks(value: object, nproc: int) -> tuple[CpuSet, ...]:
    expected = f"a list of CPU sets, one for each of the {nproc} ranks"
    # A set has no order, or in each process another one: ranks would take each other's.
    if isinstance(value, (str, bytes, AbstractSet, Mapping)) or not isinstance(value, Iterable):
        raise InvalidOptionError("rank_allowed", value, expected)
    given = tuple(islice(value, nproc + 1))
    if len(given) != nproc:
        found = f"more than {nproc}" if len(given) > nproc else len(given)
        raise InvalidOptionError("rank_allowed", value, f"{expected}; found {found}")
    return tuple(options.cpus(f"rank_allowed[{rank}]", one) for rank, one in enumerate(given))


def _optional(read: Callable[..., object]) -> Callable[..., object]:
    return lambda name, value, **how: None if value is None else read(name, value, **how)


_CORES = f"a whole number of cores from 0 to {MAX_CPU_ID}"
_LIMITS = ("min_physical_cores", "max_physical_cores")

READERS: Mapping[str, Callable[..., object]] = {
    "mode": partial(options.word, words=Mode),
    "scope": partial(options.word, words=Scope),
    "multithreading": partial(options.word, words=Multithreading),
    "balanced": options.flag,
    **dict.fromkeys(_LIMITS, _optional(options.count)),
    "partition": partial(options.word, words=Partition),
    "cpus": _optional(options.cpus),
    "reserve": partial(options.count, least=0, expected=_CORES),
}
"""The reader of each option."""

_NO_TEXTS = ("balanced", *_LIMITS, "reserve")
TEXT_READERS: Mapping[str, Callable[[str, str], object]] = {
    name: partial(read, text=True) if name in _NO_TEXTS else read for name, read in READERS.items()
}
"""The same for texts, from a variable or the command line."""


def given_options(
    arguments: Mapping[str, object], text_of: Callable[[str], str | None]
) -> dict[str, object]:
    """The options that were given: as an argument, not None, else as a variable's text."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in TEXT_READERS.keys() - given.keys():
        text = text_of(name)
        if text is not None:
            given[name] = TEXT_READERS[name](f"GPUAFF_{name.upper()}", text)
    return given


PLAN_SCHEMA_VERSION = 1


class Share(NamedTuple):
    """What one rank gets.

    Attributes:
        rank: its local rank, 0 … nproc − 1.
        gpu: the physical index of its GPU; None when no GPU is known.
        cpus: its logical CPUs.
        cores: the number of physical cores that they belong to.
        numa_nodes: the ids of the NUMA nodes that they belong to.
        source: how the CPUs near its GPU were found.
        reserved: the logical CPUs that were kept out of the share for helpers.
    """

    rank: int
    gpu: int | None
    cpus: CpuSet
    cores: int
    numa_nodes: tuple[int, ...]
    source: Source
    reserved: CpuSet = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """The share as JSON has it."""
        return {
            "rank": self.rank,
            "gpu": self.gpu,
            "cpus": format_cpulist(self.cpus),
            "cores": self.cores,
            "numa_nodes": list(self.numa_nodes),
            "source": str(self.source),
            "reserved": format_cpulist(self.reserved),
        }


class Plan(NamedTuple):
    """The CPUs of each rank.

    Attributes:
        mode: how the near cores are cut.
        scope: what counts as near.
        multithreading: which CPUs of a core are used.
        balanced: whether all shares have the same number of cores (unique modes).
        partition: ``job`` or ``machine``, as it was applied.
        border_rule: the version of the rule that the domains are from; None for ``job``.
        shares: one share per rank, by rank; only the own one where the others' are unknown.
        warnings: what is unknown or missing, and what the plan does instead.
    """

    mode: Mode
    scope: Scope
    multithreading: Multithreading
    balanced: bool
    shares: tuple[Share, ...]
    partition: Partition = Partition.JOB
    border_rule: int | None = None
    warnings: tuple[Notice, ...] = ()

    def share_of(self, rank: int) -> Share:
        """The share of a rank.

        Raises:
            KeyError: the plan has none for it.
        """
        return {share.rank: share for share in self.shares}[rank]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it; ``docs/plan-json.md`` has the schema."""
        return {
            "schema_version": PLAN_SCHEMA_VERSION,
            "mode": str(self.mode),
            "scope": str(self.scope),
            "partition": str(self.partition),
            "border_rule": self.border_rule,
            "ranks": [share.to_dict() for share in self.shares],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }
