"""What the tests of the gate to NVML share: machines, and how a process reads them."""

from __future__ import annotations

import base64
import pickle
from typing import Any, NamedTuple

from gpuaff._system.nvml_records import GpuReading, Matrix
from gpuaff.cpuset import parse_cpulist as cpus
from gpuaff.errors import NoDriverError
from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.fakedriver.driver import FakeDriver

PROGRAM = """
import base64, pickle, sys
from gpuaff.errors import NoDriverError
from gpuaff._system import nvml
{before}
try:
    with nvml.open_session() as session:
        answer = session.read_gpus(links={links})
except NoDriverError as error:
    answer = error
{after}
print("ANSWER", base64.b64encode(pickle.dumps(answer)).decode())
"""


class DriverReading(NamedTuple):
    """What the driver says about a machine."""

    gpus: tuple[GpuReading, ...] = ()
    links: Matrix | None = None


def read(
    driver: FakeDriver,
    *,
    links: bool = False,
    before: str = "",
    after: str = "",
    env: dict[str, str] | None = None,
) -> DriverReading:
    """What a process on the fake machine reads; its NoDriverError is raised here."""
    program = PROGRAM.format(links=links, before=before, after=after)
    return answer_of(driver.run(program, env=env).stdout)


def answer_of(output: str) -> DriverReading:
    lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    answer = pickle.loads(base64.b64decode(lines[0].removeprefix("ANSWER ")))
    if isinstance(answer, NoDriverError):
        raise answer
    return DriverReading(*answer)


SLICES = tuple(
    MigInstance(
        uuid=f"MIG-aaaaaaaa-0000-0000-0000-00000000000{number}",
        gpu_instance=instance,
        compute_instance=0,
    )
    for number, instance in ((1, 1), (2, 5))
)

# A machine whose GPUs answer every question: GPU 0 is cut by MIG, each has memory of its own,
# and the three are connected in three ways.
FULL = Topology(
    cpus=cpus("0-15"),
    allowed=cpus("0-15"),
    gpus=tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index:08x}-5555-6666-7777-888888888888",
            pci_bus_id=f"000{index}:01:00.0",
            name="GH200 480GB",
            node_cpus=cpus(f"{4 * index}-{4 * index + 3}"),
            socket_cpus=cpus("0-15"),
            numa_node=index,
            memory_node=4 + 8 * index,
            mig=SLICES if index == 0 else None,
        )
        for index in range(3)
    ),
    links=(("X", "NV4", "SYS"), ("NV4", "X", "PXB"), ("SYS", "PXB", "X")),
)


def full(index: int) -> GpuReading:
    """What GPU ``index`` of FULL is to say."""
    gpu = FULL.gpus[index]
    where = gpu.node_cpus, gpu.socket_cpus, frozenset({index}), gpu.memory_node
    return GpuReading(index, gpu.uuid, gpu.name, gpu.pci_bus_id, *where, gpu.mig)


def one_gpu(**about: Any) -> Topology:
    gpu = Gpu(index=0, node_cpus=cpus("0-3"), socket_cpus=cpus("0-7"))._replace(**about)
    return Topology(cpus=cpus("0-7"), allowed=cpus("0-7"), gpus=(gpu,))


def without(gpu: GpuReading, *fields: str) -> GpuReading:
    """A reading that lacks some fields; its problems are looked at apart."""
    lost: dict[str, Any] = dict.fromkeys(fields)
    return gpu._replace(problems=(), **lost)
