"""``claim_gpus``: which GPUs, how CUDA is shown them, and what makes one busy."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.claim_lab import Lab
from tests.fakedriver.play import this_machine
from tests.processes import CPUS

pytestmark = pytest.mark.fake_driver

UUID = "GPU-00000000-0000-4000-8000-{:012x}"
MIG = "MIG-00000000-0000-4000-9000-{:012x}"


def slurm(**variables: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "1", **{f"SLURM_{key}": text for key, text in variables.items()}}


def visible(text: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": text}


class TestWhich:
    @pytest.mark.parametrize(
        ("call", "gpus"),
        [
            ("", "(0, 0)"),
            ("4", "(0, 0) (1, 1) (2, 2) (3, 3)"),
            ("gpus=3", "(3, 0)"),
            ("gpus='3,1'", "(3, 0) (1, 1)"),
            (f"2, gpus=['{UUID.format(3)}', 1]", "(3, 0) (1, 1)"),
            ("gpus=['0000:03:00.0', '00000000:01:00.0']", "(2, 0) (0, 1)"),
            ("2, candidates=[3, 1, 2]", "(1, 0) (2, 1)"),
        ],
    )
    def test_those_that_were_asked_for(self, lab: Lab, call: str, gpus: str) -> None:
        variables, got, _ = lab.shown(call)
        assert got == gpus
        indices = [part.split(",")[0] for part in gpus.strip("()").split(") (")]
        assert variables == f"{','.join(indices)} PCI_BUS_ID"

    @pytest.mark.parametrize(
        ("call", "env", "gpus"),
        [
            ("2", visible("2,3"), "(2, 0) (3, 1)"),
            ("2", visible(" 3, 1,9,0"), "(3, 0) (1, 1)"),
            ("2", visible(f"MIG-{UUID.format(3)[4:]},{UUID.format(2)}"), "(3, 0) (2, 1)"),
            ("'auto'", visible("3,1"), "(3, 0) (1, 1)"),
            ("'auto'", slurm(STEP_GPUS="1,2,3"), "(1, 0) (2, 1) (3, 2)"),
            ("'auto'", slurm(GPUS_ON_NODE="2"), "(0, 0) (1, 1)"),
            ("'auto'", {"SGE_HGR_gpu": "3 1"}, "(1, 0) (3, 1)"),
            ("'auto'", {**slurm(GPUS_ON_NODE="3"), **visible("2")}, "(2, 0)"),
        ],
    )
    @pytest.mark.case("D8")
    def test_of_those_that_are_visible_or_granted(
        self, lab: Lab, call: str, env: dict[str, str], gpus: str
    ) -> None:
        assert lab.shown(call, **env)[1] == gpus

    @pytest.mark.parametrize(
        ("call", "env", "reason"),
        [
            ("3, wait=None", visible("2,3"), "='2,3' shows 2 GPUs of the 4 here"),
            *(("1, wait=None", visible(text), "1 GPU; CUDA_") for text in ("", "all", "0,0")),
            ("'auto'", visible("7"), "1 GPU; CUDA_VISIBLE_DEVICES='7' hides all GPUs"),
            ("1", {"CUDA_DEVICE_ORDER": "pci"}, "='pci' is not a word that CUDA knows"),
            ("gpus=[0]", visible("1,2"), "1 GPU; this process may not use GPU 0: CUDA_VISIBLE_"),
            ("candidates=[0, 1]", visible("1,2"), "this process may not use GPU 0"),
            ("'auto', wait=None", slurm(GPUS_ON_NODE="0"), "; SLURM_GPUS_ON_NODE=0 grants no GPUs"),
        ],
    )
    def test_not_enough_of_them(
        self, lab: Lab, call: str, env: dict[str, str], reason: str
    ) -> None:
        said = lab.refused(call, **env)
        assert said.startswith("NotEnoughGpusError requested ")
        assert reason in said

    def test_auto_where_no_scheduler_says_how_many(self, lab: Lab) -> None:
        said = lab.refused("'auto'")
        assert said.startswith("InvalidOptionError n='auto': expected a number, since no scheduler")

    def test_a_prefix(self, make_lab: Callable[[Topology], Lab]) -> None:
        uuids = [f"GPU-{name}-0000-4000-8000-000000000000" for name in ("ab000000", "ac000000")]
        gpus = (Gpu(index=i, uuid=uuid, name="Fake GPU") for i, uuid in enumerate(uuids))
        lab = make_lab(this_machine(2)._replace(gpus=tuple(gpus)))
        assert lab.shown("gpus='GPU-ac'")[1] == "(1, 0)"
        assert "this fits several of them" in lab.refused("gpus='GPU-a'")

    def test_enough_free_memory(self, lab: Lab) -> None:
        for gpu, size in enumerate((10, 60, 10, 50)):
            lab.driver.set_memory_total(gpu, size << 30)
        assert lab.shown("2, min_free_memory=40 << 30")[1] == "(1, 0) (3, 1)"
        said = lab.refused("3, min_free_memory=40 << 30")
        assert said.startswith("NotEnoughGpusError requested 3 GPUs; 2 can be used | GPU 0: has")

    def test_not_too_busy(self, lab: Lab) -> None:
        for gpu, load in enumerate((90, 10, 90, 11)):
            lab.driver.set_utilization(gpu, load)
        assert lab.shown("1, max_utilization=10")[1] == "(1, 0)"
        said = lab.refused("2, max_utilization=10")
        assert said.startswith("GpusBusyError requested 2 GPUs; only 1 is free | to queue: ")
        assert " | GPU 0: its utilization, 90" in said

    def test_the_best_connected(self, make_lab: Callable[[Topology], Lab]) -> None:
        """In a DGX-1 two NVLinks join 1 and 5, one 4 and 5, none 1 and 4; as CUDA counts them."""
        lab = make_lab(Topology.named("dgx-1"))
        assert lab.shown("2, candidates=[4, 5, 1]")[:2] == ["5,1 PCI_BUS_ID", "(5, 0) (1, 1)"]

    def test_what_is_idle_for_others_counts(self, make_lab: Callable[[Topology], Lab]) -> None:
        """0 and 3 are a pair, 1 and 2 another; the claim breaks no pair that is free.

        GPUs 2 and 3 are too small for this claim, but their pairs are of use to the next one.
        """
        links = (
            ("X", "SYS", "SYS", "PIX"),
            ("SYS", "X", "PIX", "SYS"),
            ("SYS", "PIX", "X", "SYS"),
            ("PIX", "SYS", "SYS", "X"),
        )
        lab = make_lab(this_machine(4)._replace(links=links))
        lab.driver.set_memory_total(2, 1 << 30)
        lab.driver.set_memory_total(3, 1 << 30)
        lab.driver.use(3, os.getpid())
        assert lab.shown("1, min_free_memory=2 << 30, own_is_free=False")[1] == "(0, 0)"
        lab.driver.leave(os.getpid())
        lab.driver.use(2, os.getpid())
        assert lab.shown("1, min_free_memory=2 << 30, own_is_free=False")[1] == "(1, 0)"


class TestHowCudaIsShownThem:
    def test_by_uuid(self, lab: Lab) -> None:
        said = lab.shown("gpus=[3, 1], visible='uuid'")[:2]
        assert said == [f"{UUID.format(3)},{UUID.format(1)} PCI_BUS_ID", "(3, 0) (1, 1)"]

    def test_not_at_all(self, lab: Lab) -> None:
        assert lab.shown("gpus=[3, 1], visible=None")[:2] == ["None None", "(3, 3) (1, 1)"]
        inherited = visible("3,1,2")
        got = lab.shown("gpus=[2, 3], visible=None", **inherited)[:2]
        assert got == ["3,1,2 None", "(2, 2) (3, 0)"]
        assert lab.shown("gpus=[2], visible=None, placeholder=None", **inherited)[1] == "(2, 2)"

    def test_unlike_gpus(self, make_lab: Callable[[Topology], Lab]) -> None:
        """CUDA counts them from the fastest, unless it is told (case D6)."""
        gpus = tuple(Gpu(index=i, name=name) for i, name in enumerate(("Slow", "Fast", "Slow")))
        lab = make_lab(this_machine(3)._replace(gpus=gpus))
        lab.driver.set_fastest([1, 0, 2])
        assert lab.shown("gpus=[2, 1]")[:2] == ["2,1 PCI_BUS_ID", "(2, 0) (1, 1)"]
        assert lab.shown("gpus=[0, 1], visible=None")[:2] == ["None None", "(0, 1) (1, 0)"]
        for kind in ("None", "print"):
            said = lab.refused(f"gpus=[0], visible=None, placeholder={kind}")
            assert said.startswith("InvalidOptionError visible=None: expected index or uuid: ")
        lab.driver.use(0, os.getpid())
        said = lab.refused("gpus=[0], visible=None, placeholder=None, wait=5")
        assert said.startswith("InvalidOptionError visible=None"), "it is not waited for"
        lab.driver.leave(os.getpid())
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert lab.shown("gpus=[0], visible=None, placeholder=None", **order)[1] == "(0, 0)"

    def test_denied_gpus_are_not_counted(self, lab: Lab) -> None:
        """CUDA's numbers are of those that a device cgroup leaves."""
        lab.driver.deny(0)
        lab.driver.deny(2)
        assert lab.shown("2")[:2] == ["0,1 PCI_BUS_ID", "(1, 0) (3, 1)"]
        assert lab.shown("gpus=[3]")[:2] == ["1 PCI_BUS_ID", "(3, 0)"]
        assert "this machine has 2 GPUs" in lab.refused("3")
        assert "this is none of them" in lab.refused("gpus=[0]")


class TestMig:
    @pytest.fixture
    def cut(self, make_lab: Callable[[Topology], Lab]) -> Lab:
        """GPU 0 is whole; 1 and 2 are cut into two instances each."""
        whole, *others = this_machine(3).gpus

        def instance(number: int, part: int) -> MigInstance:
            return MigInstance(uuid=MIG.format(number), gpu_instance=part, compute_instance=0)

        cut = (
            gpu._replace(mig=(instance(10 * gpu.index, 1), instance(10 * gpu.index + 1, 2)))
            for gpu in others
        )
        return make_lab(this_machine(3)._replace(gpus=(whole, *cut)))

    def test_whole_gpus_first(self, cut: Lab) -> None:
        assert cut.shown("")[:2] == ["0 PCI_BUS_ID", "(0, 0)"]
        assert "this machine has 1 GPU and 4 MIG instances" in cut.refused("2")

    def test_an_instance(self, cut: Lab) -> None:
        """It is named by its UUID, also where numbers are asked for."""
        said = cut.shown(f"gpus='{MIG.format(20)}', visible='index'")[:2]
        assert said == [f"{MIG.format(20)} PCI_BUS_ID", "(2, 0)"]
        assert cut.shown("", CUDA_VISIBLE_DEVICES=MIG.format(11))[1] == "(1, 0)"

    @pytest.mark.parametrize(
        ("call", "start"),
        [
            # Without variables CUDA shows the whole GPU: the instance has no ordinal.
            (
                f"gpus='{MIG.format(20)}', visible=None, placeholder=None",
                "InvalidOptionError visible=None: expected index or uuid: as it is, ",
            ),
            (
                f"gpus=['{MIG.format(10)}', '{MIG.format(11)}']",
                "NotEnoughGpusError requested 2 GPUs; CUDA shows a process no more than one MIG",
            ),
        ],
    )
    def test_what_cuda_does_not_show(self, cut: Lab, call: str, start: str) -> None:
        assert cut.refused(call).startswith(start)

    def test_neighbours_do_not_meet(self, cut: Lab) -> None:
        """The second one gets the other instance, the third is told who has both."""
        ask = f"1, candidates=['{MIG.format(10)}', '{MIG.format(11)}']"
        for uuid in (MIG.format(10), MIG.format(11)):
            code = f"claim = gpuaff.claim_gpus({ask}); say(claim.gpus[0].uuid); go_on()"
            assert cut.start(code).heard() == uuid
        said = cut.refused(ask)
        assert "requested 1 GPU; none is free; " in said
        assert f" | MIG instance {MIG.format(10)}: leased by " in said
        assert cut.driver.double_holdings() == []


class TestUuids:
    """A claim knows a GPU by its UUID; a VM whose GPUs are passed through wrongly has bad ones."""

    def test_two_have_the_same(self, lab: Lab) -> None:
        """They are left out, and are not waited for: each would hold the other's lease."""
        lab.driver.state.gpus[2].uuid = lab.driver.state.gpus[0].uuid
        same = f"its UUID, '{UUID.format(0)}', is another one's as well"
        both = f"GPU 0 is left out: {same}; GPU 2 is left out: {same}"
        for call, reason in (
            ("3, wait=None", f"3 GPUs; this machine has 2 GPUs; {both}"),
            ("gpus=[2], wait=None", f"1 GPU; GPU 2 is left out: {same}"),
            ("2, candidates=[0, 3]", f"2 GPUs; GPU 0 is left out: {same}"),
        ):
            assert lab.refused(call) == f"NotEnoughGpusError requested {reason}"
        names = f"{UUID.format(1)},{UUID.format(3)}"
        assert lab.shown("2")[:2] == [f"{names} PCI_BUS_ID", "(1, 0) (3, 1)"]

    @pytest.mark.parametrize("text", ["GPU-1,2", "GPU-1:2", "GPU-1\n2", "GPU-\u00e4", "x", "GPU-"])
    def test_one_that_is_none(self, lab: Lab, text: str) -> None:
        """It would break GPUAFF_CLAIM, which has them between commas."""
        lab.driver.state.gpus[0].uuid = text.encode()
        said = lab.refused("4, wait=None")
        assert said.endswith(f"GPU 0 is left out: its UUID, {text!a}, is invalid")
        assert lab.shown("")[1] == "(1, 0)"


class TestBusy:
    def reasons(self, lab: Lab, call: str = "4") -> str:
        said = lab.refused(call)
        assert said.startswith("GpusBusyError requested 4 GPUs; "), said
        return said

    def test_a_lease(self, lab: Lab) -> None:
        """Those who hold no context as well (case E1)."""
        holder = lab.holder("claim_gpus(gpus=[2], placeholder=None)")
        said = self.reasons(lab)
        assert "only 3 are free | to queue: " in said
        assert " | GPU 2: leased by " in said
        assert f"pid {holder.pid}" in said

    @pytest.mark.parametrize(
        ("call", "env", "narrowed"),
        [
            ("1, candidates=[0]", {}, "; candidates= allows 1 GPU of the 4 here"),
            ("", visible("0"), "; CUDA_VISIBLE_DEVICES='0' shows 1 GPU of the 4 here"),
            ("", slurm(STEP_GPUS="0"), "; SLURM_STEP_GPUS=0 grants 1 GPU of the 4 here"),
            ("gpus=0", {}, ""),
            ("4", visible("0,1,2,3"), ""),
        ],
    )
    def test_what_to_try(self, lab: Lab, call: str, env: dict[str, str], narrowed: str) -> None:
        """Asked, found, what has narrowed the choice; that one can wait; then a line a GPU."""
        lab.holder("claim_gpus(gpus=0)")
        said = lab.refused(call, **env)
        found, remedy, gpu = said.split(" | ")
        assert found.startswith("GpusBusyError requested ")
        assert found.endswith(f" free{narrowed}")
        assert remedy == "to queue: wait=600 (at most so many seconds) or wait=None (no limit)"
        assert gpu.startswith("GPU 0: leased by ")

    def test_what_has_been_tried_is_not_advised(self, lab: Lab) -> None:
        lab.holder("claim_gpus(4)")
        said = lab.refused("wait=0.01, candidates=[0, 1]")
        assert said.startswith("ClaimTimeoutError waited 0.")
        assert "; candidates= allows 2 GPUs of the 4 here | GPU 0: leased by " in said
        assert "to queue" not in said

    @pytest.mark.case("E11", "E12")
    def test_a_process_without_a_lease(self, lab: Lab) -> None:
        """One that has started us is our own, unless those count, too."""
        lab.driver.use(1, os.getpid())
        assert f"(pid {os.getpid()})" in self.reasons(lab, "4, own_is_free=False")
        assert lab.shown("4")[1] == "(0, 0) (1, 1) (2, 2) (3, 3)"

    def test_memory_that_no_process_explains(self, lab: Lab) -> None:
        lab.driver.set_memory_used(3, 2 << 30)
        assert "GPU 3: 2 GiB are in use that no visible process explains" in self.reasons(lab)

    def test_compute_modes(self, lab: Lab) -> None:
        lab.driver.set_compute_mode(0, 3)
        assert lab.shown("gpus=[0]")[1] == "(0, 0)"
        lab.driver.use(0, os.getpid())
        assert "GPU 0: in exclusive process mode and used by " in self.reasons(lab)
        lab.driver.set_compute_mode(1, 2)
        said = lab.refused("4, wait=None")
        assert said.startswith("NotEnoughGpusError requested 4 GPUs; 3 can be used | GPU 1: its")


@pytest.mark.needs("two-cpus")
class TestPinnedBefore:
    """A process that was pinned and then claims may get a GPU of another part of the machine."""

    FAR = """
    import logging
    logging.basicConfig(stream=sys.stdout, level="WARNING", format="%(message)s")
    if PIN:
        gpuaff.set_affinity(0, 1)
    for _ in range(2):  # it is said once, and known of each claim
        with gpuaff.claim_gpus(CLAIM) as claim:
            say(*(notice.code for notice in claim.warnings))
    """

    def said(self, lab: Lab, claim: str, *, pin: bool = True) -> list[str]:
        """The process is put next to GPU 0, on the first CPU of this machine."""
        for gpu, cpu in enumerate((*CPUS[:2], *CPUS[:2])):
            lab.driver.set_cpus(gpu, node=[cpu])
        return lab.run(self.FAR.replace("PIN", str(pin)).replace("CLAIM", claim))

    def test_it_is_said(self, lab: Lab) -> None:
        said, first, second = self.said(lab, "gpus=[1]")
        assert said == (
            "gpuaff: set_affinity() was called before the claim and pinned this process to "
            f"CPUs {CPUS[0]}, none of them near the claimed GPU 1 ({CPUS[1]}): claim first, or "
            "with pin=True, or call set_affinity() again now [pinned-far]"
        )
        assert (first, second) == ("pinned-far", "pinned-far")

    @pytest.mark.parametrize(
        ("claim", "pin"), [("gpus=[0]", True), ("gpus=[2]", True), ("gpus=[1]", False)]
    )
    def test_nothing_to_say(self, lab: Lab, claim: str, pin: bool) -> None:
        assert self.said(lab, claim, pin=pin) == ["", ""]

    def test_bound_from_outside(self, lab: Lab) -> None:
        """Under taskset it may not go near that GPU, whatever is called: so nothing is advised."""
        lab.driver.set_cpus(0, node=[CPUS[0]])
        lab.driver.set_cpus(1, node=[CPUS[1]])
        code = f"""
        os.sched_setaffinity(0, {{{CPUS[0]}}})
        gpuaff.set_affinity(0, 1)
        claim = gpuaff.claim_gpus(gpus=[1])
        say([notice.code for notice in claim.warnings], *gpuaff.set_affinity(0, 1))
        """
        assert lab.one(code) == f"[] {CPUS[0]}"
