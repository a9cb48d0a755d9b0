"""Which GPUs processes are on, and whether their CPUs are near those."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpuaff.allocator.modes import Scope
from gpuaff.allocator.near import Neighbourhood
from gpuaff.checking.check import Check
from gpuaff.cpuset import CpuSet
from gpuaff.errors import NoDriverError
from gpuaff.notices import Notice
from gpuaff.records import dataclass, replace
from gpuaff.system import kernel, nvml
from gpuaff.system.kernel import Tree
from gpuaff.topology.device_files import indices_by_minor, minors_of
from gpuaff.topology.model import Gpu, Topology

_NONE: CpuSet = frozenset()

_FOREIGN = Notice(
    "pids-foreign",
    "the driver tells processes by numbers that are not those of this container: which GPUs a "
    "process is on is known from its open device files only; look from the host",
)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Who is on which GPU of a machine.

    Attributes:
        topology: the machine.
        users: the processes that the driver names, by the index of the GPU.
        minors: the indices of GPUs by the numbers of their device files.
        notices: what could not be told.
    """

    topology: Topology
    users: Mapping[int, Collection[int]]
    minors: Mapping[int, int]
    notices: tuple[Notice, ...] = ()

    def of(self, check: Check, files: Collection[str]) -> Check:
        """A process, completed by its GPUs and what is near them.

        Args:
            check: the process.
            files: what it has open. CUDA opens the device files of all GPUs that it may see, so
                they count only where the driver does not name the process.
        """
        told = {index for index, pids in self.users.items() if check.pid in pids}
        opened = {self.minors.get(minor) for minor in minors_of(files)}
        gpus = [gpu for gpu in self.topology.gpus if gpu.index in (told or opened)]
        near, socket = self._near(gpus, Scope.NODE), self._near(gpus, Scope.SOCKET)
        # A whole socket is a choice that set_affinity offers too (scope="socket").
        far = _NONE if near is None or socket is None else check.usual - near - socket
        return replace(check, gpus=tuple(gpu.index for gpu in gpus), near=near, far=far)

    def _near(self, gpus: list[Gpu], scope: Scope) -> CpuSet | None:
        """The CPUs near any of some GPUs; None where one of them does not tell."""
        search = Neighbourhood(self.topology, self.topology.cpus)
        found = [search.near(gpu, scope) for gpu in gpus]
        if not found or not all(near.is_local for near in found):
            return None
        return _NONE.union(*(near.cpus for near in found))


def look() -> Placement:
    """Look at this machine's GPUs and who is on them; best effort, as all that concerns GPUs."""
    topology = Topology.observe(links=False)
    try:
        told = {gpu.index: gpu.pids or frozenset() for gpu in nvml.users()}
    except NoDriverError:
        told = {}
    foreign = _are_foreign(frozenset[int]().union(*told.values()))
    return Placement(
        topology=topology,
        users={} if foreign else told,
        minors=indices_by_minor(Tree(), {gpu.pci_bus_id: gpu.index for gpu in topology.gpus}),
        notices=(_FOREIGN,) if foreign else (),
    )


def _are_foreign(pids: frozenset[int]) -> bool:
    """Whether the driver counts in another PID namespace than we do (case E15).

    Numbers that happen to be here as well would be taken for processes of this one: so all of them
    must be here, and one that ends meanwhile is a reason to say nothing.
    """
    if kernel.in_first_pid_namespace():
        return False
    return any(kernel.process_of(pid) != pid for pid in pids)
