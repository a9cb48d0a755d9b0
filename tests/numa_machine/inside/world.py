"""What scenarios are made of: GPUs, ranks, cpusets, and CPUs that come and go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpuaff.cpuset import parse_cpulist
from gpuaff.topology.model import Gpu, Topology
from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.numa_machine.inside.looking import field, nodes_of_pages, policy_of_pages, threads
from tests.processes import Program, environment, stopped

LAUNCHER = ["sh", "-c", '"$0" "$@"; exit $?']
"""A prefix that stays the parent of what it starts, as a launcher does."""

JOB = Path("/job")
CPU = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")


def text(path: Path) -> str:
    """What a file of the kernel says."""
    return path.read_text().strip()


def display_devices() -> list[Path]:
    """Those of a vendor that makes GPUs, by their addresses."""
    devices = sorted(PCI.iterdir())
    return [
        device
        for device in devices
        if text(device / "class").startswith("0x03") and text(device / "vendor") == "0x1002"
    ]


def make_driver() -> FakeDriver:
    """A fake NVIDIA driver whose GPUs are the machine's display devices."""
    gpus = [_gpu(index, device) for index, device in enumerate(display_devices())]
    online = parse_cpulist(text(CPU / "online"))
    topology = Topology(cpus=online, allowed=online, gpus=tuple(gpus))
    return FakeDriver(topology, Path("/tmp/driver"), builds=JOB / "builds")


def _gpu(index: int, device: Path) -> Gpu:
    """A GPU that is near what its PCI device is near; the driver also knows its package."""
    near = parse_cpulist(text(device / "local_cpulist"))
    package = text(CPU / f"cpu{min(near)}/topology/package_cpus_list")
    return Gpu(
        index=index,
        pci_bus_id=device.name,
        name="Emulated GPU",
        node_cpus=near,
        socket_cpus=parse_cpulist(package),
        numa_node=int(text(device / "numa_node")),
    )


class Rank:
    """A process that does what it is told (:mod:`numa_machine.inside.agent`)."""

    def __init__(self, process: Program) -> None:
        self._process = process
        self.pid = int(process.heard())

    def ask(self, do: str, **what: Any) -> Any:
        """Let it do something, and wait for the answer."""
        self.tell(do, **what)
        return self.answer()

    def tell(self, do: str, **what: Any) -> None:
        """Let it do something; the answer is waited for later."""
        self._process.go_on(json.dumps({"do": do, **what}))

    def answer(self) -> Any:
        """What it answers."""
        return json.loads(self._process.heard())

    def threads(self) -> list[str]:
        """Its threads' CPUs, seen from outside."""
        return threads(self.pid)

    def mems(self) -> str:
        """The NUMA nodes whose memory it may use, seen from outside."""
        return field(self.pid, self.pid, "Mems_allowed_list")

    def touched(self, mib: int = 16, on: Sequence[int] | None = None) -> dict[str, Any]:
        """Let it write to new memory, and look where that lies."""
        address, size = self.ask("touch", mib=mib, on=on)
        return {
            "pages": nodes_of_pages(self.pid, address, size),
            "policy": policy_of_pages(self.pid, address),
        }


class Box:
    """A cpuset in which jobs run."""

    def __init__(self, made: cpusets.Cpuset) -> None:
        self.folder = made.folder
        self.inside = [*made.join_command(), *LAUNCHER]
        """A prefix that starts a launcher in it."""
        self.cpus = str(made.folder / "cpuset.cpus")
        """The file that holds the CPUs that it grants."""

    def grant(self, cpus: str) -> None:
        """Change them."""
        Path(self.cpus).write_text(cpus)


class World:
    """The machine, and the processes of one scenario; all of it is put back at the end."""

    def __init__(self, driver: FakeDriver, stack: ExitStack) -> None:
        self._driver = driver
        self._stack = stack

    def env(self) -> dict[str, str]:
        """The variables that show a process the GPUs."""
        return environment(self._driver.env())

    def rank(self, prefix: Sequence[str] = ()) -> Rank:
        """Start a rank, with a command before it."""
        return self.each([prefix])[0]

    def ranks(self, count: int, prefix: Sequence[str] = (), **env: str) -> list[Rank]:
        """Start several with the same command before them, and further variables."""
        return self.each([prefix] * count, **env)

    def each(self, prefixes: Sequence[Sequence[str]], **env: str) -> list[Rank]:
        """Start one with each of these commands before it."""
        return self._started([(prefix, env) for prefix in prefixes])

    def launched(self, envs: Sequence[Mapping[str, str]]) -> list[Rank]:
        """Start one with each of these sets of variables, as a launcher does that binds nobody."""
        return self._started([((), env) for env in envs])

    def _started(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Rank]:
        script = "from tests.numa_machine.inside.agent import main; main()"
        started = [
            stopped(script, env={**self.env(), **env}, prefix=prefix) for prefix, env in commands
        ]
        processes = [self._stack.enter_context(one) for one in started]
        return [Rank(process) for process in processes]  # which waits until it is there

    def cpuset(self, cpus: str, mems: str | None = None) -> Box:
        """Make a cpuset."""
        made = Box(self._stack.enter_context(cpusets.cpuset(parse_cpulist(cpus))))
        if mems is not None:
            (made.folder / "cpuset.mems").write_text(mems)
        return made

    @contextmanager
    def flapping(self, *cpus: int) -> Iterator[None]:
        """Take CPUs offline and bring them back, again and again, meanwhile."""
        over = threading.Event()

        def flap() -> None:
            while not over.is_set():
                with self.without(*cpus):
                    over.wait(0.05)

        thread = threading.Thread(target=flap)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def without(self, *cpus: int) -> Iterator[None]:
        """Take CPUs offline meanwhile."""
        try:
            for cpu in cpus:
                switch(cpu).write_text("0")
            yield
        finally:
            for cpu in cpus:
                switch(cpu).write_text("1")


def switch(cpu: int) -> Path:
    """The file that takes a CPU offline, or online."""
    return CPU / f"cpu{cpu}/online"


def pin_all(ranks: Sequence[Rank], **options: Any) -> list[Any]:
    """Let all ranks of a job pin themselves, at the same time."""
    for number, rank in enumerate(ranks):
        rank.tell("pin", rank=number, of=len(ranks), **options)
    return [rank.answer() for rank in ranks]


def ask_all(ranks: Sequence[Rank], do: str, **what: Any) -> list[Any]:
    """Let all ranks do something, at the same time."""
    for rank in ranks:
        rank.tell(do, **what)
    return [rank.answer() for rank in ranks]


def all_online() -> None:
    """Bring all CPUs back that the machine has."""
    for cpu in parse_cpulist(text(CPU / "present")) - parse_cpulist(text(CPU / "online")):
        switch(cpu).write_text("1")


def on(cpus: str) -> list[str]:
    """A prefix that starts a command on these CPUs only."""
    return ["taskset", "-c", cpus]
