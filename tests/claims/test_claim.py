"""A claim's life: kept, given back, and what this process may claim after that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuaff.topology.model import Topology
from tests.claim_lab import Lab
from tests.fakedriver.play import this_machine

pytestmark = pytest.mark.fake_driver


class TestWhileItLasts:
    def test_it_tells_what_it_has(self, lab: Lab) -> None:
        said = lab.run("""
            claim = gpuaff.claim_gpus(2, placeholder=None)
            gpu = claim.gpus[1]
            say(gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.local, gpu.name)
            say(claim, claim.is_inherited, claim.is_released, claim.cpus, claim.placeholders)
            assert all(os.get_inheritable(fd) is False and fd >= 200 for fd in claim.fds)
            say(len(claim.fds), gpuaff.current_claim() is claim)
            """)
        assert said == [
            "1 GPU-00000000-0000-4000-8000-000000000001 0000:02:00.0 1 Fake GPU",
            "<Claim of GPU 0, GPU 1> False False None ()",
            "3 True",
        ]

    def test_one_that_is_not_kept_stays(self, lab: Lab) -> None:
        program = lab.start("""
            import gc
            gpuaff.claim_gpus(gpus=[1]); gc.collect()
            say(gpuaff.current_claim())
            go_on()
            """)
        assert program.heard() == "<Claim of GPU 1>"
        assert "GPU 1: leased by" in lab.refused("4")
        assert lab.used() == [1]

    def test_a_second_one_is_refused_by_name(self, lab: Lab) -> None:
        code = """
        claim = gpuaff.claim_gpus(gpus=[2, 3])
        error = refused(1)
        told(error)
        say(error.gpus == tuple(gpu.uuid for gpu in claim.gpus))
        """
        said, has_gpus = lab.run(code)
        assert said.startswith("AlreadyClaimedError this process already has a claim, of GPU 2 (")
        assert has_gpus == "True"

    def test_a_second_call_while_one_is_made(self, lab: Lab) -> None:
        """From the placeholder, say: it is no deadlock."""
        code = """
        def occupant(number):
            told(refused(1))
        claim = gpuaff.claim_gpus(placeholder=occupant)
        say(claim.placeholders)
        """
        refused, placeholders = lab.run(code)
        assert refused.startswith("AlreadyClaimedError this process is already claiming GPUs")
        assert placeholders == "(None,)"

    def test_two_threads(self, lab: Lab) -> None:
        code = """
        got, lost = [], []
        barrier = threading.Barrier(4)
        def claim():
            barrier.wait()
            try:
                got.append(gpuaff.claim_gpus())
            except AlreadyClaimedError as error:
                lost.append(error)
        threads = [threading.Thread(target=claim) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        say(len(got), len(lost), got == [gpuaff.current_claim()])
        """
        for _ in range(2):
            assert lab.one(code) == "1 3 True"
        assert lab.used() == []


class TestRelease:
    @pytest.mark.parametrize("placeholder", ["'context'", "None", "lambda number: number"])
    @pytest.mark.parametrize("visible", ["'index'", "'uuid'", "None"])
    def test_all_is_as_before(self, lab: Lab, placeholder: str, visible: str) -> None:
        code = f"""
        before = state()
        with gpuaff.claim_gpus(2, placeholder={placeholder}, visible={visible}, pin=True) as claim:
            assert differs(before, state())
        assert not differs(before, state()), differs(before, state())
        say(claim, claim.is_released, claim.fds, gpuaff.current_claim())
        claim.release()
        go_on()
        """
        program = lab.start(code, CUDA_VISIBLE_DEVICES="3,2,1")
        assert program.heard() == "<released Claim of GPU 2, GPU 1> True () None"
        assert lab.used() == []
        lab.one("say(gpuaff.claim_gpus(4))")

    def test_what_somebody_has_changed_meanwhile_stays(self, lab: Lab) -> None:
        code = """
        claim = gpuaff.claim_gpus()
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"
        del os.environ["GPUAFF_CLAIM"]
        claim.release()
        say(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
        """
        assert lab.one(code) == "7 None"

    def test_at_the_end_of_a_block_that_fails(self, lab: Lab) -> None:
        code = """
        try:
            with gpuaff.claim_gpus() as claim:
                raise ValueError("the job's own")
        except ValueError as error:
            say(error, claim.is_released)
        """
        assert lab.one(code) == "the job's own True"

    def test_a_placeholder_whose_release_fails(self, lab: Lab) -> None:
        """The rest is given back, and the error told."""
        code = """
        def occupant(number):
            return number
        def give_back(held):
            if held == 1:
                raise ValueError("no")
            say("back", held)
        occupant.release = give_back
        before = state()
        claim = gpuaff.claim_gpus(3, placeholder=occupant)
        try:
            claim.release()
        except ValueError as error:
            say(error)
        assert not differs(before, state()), differs(before, state())
        claim.release()
        """
        assert lab.run(code) == ["back 2", "back 0", "no"]


class TestTheNextClaim:
    """CUDA shows for good what the first claim had, once it was started."""

    def test_the_same_again(self, lab: Lab) -> None:
        code = """
        gpuaff.claim_gpus(gpus=[3, 1]).release()
        for call in (dict(n=2), dict(gpus=[1, 3]), dict(n="auto"), dict(n=2, candidates=[0, 1, 3]),
                     dict(gpus=["0000:04:00.0", "GPU-00000000-0000-4000-8000-000000000001"]),
                     dict(n=2, visible=None), dict(n=2, visible="uuid")):
            with gpuaff.claim_gpus(**call) as claim:
                say(*((gpu.index, gpu.local) for gpu in claim.gpus))
        """
        assert lab.run(code) == ["(3, 0) (1, 1)"] * 7

    @pytest.mark.parametrize(
        "call", ["1", "3", "gpus=[3]", "gpus=[3, 2]", "2, candidates=[0, 1, 2]", "gpus=[1, 2, 3]"]
    )
    def test_others(self, lab: Lab, call: str) -> None:
        code = f"""
        uuids = [gpu.uuid for gpu in gpuaff.claim_gpus(gpus=[3, 1]).gpus]
        gpuaff.current_claim().release()
        error = refused({call})
        told(error)
        say(list(error.gpus) == uuids)
        """
        said, has_gpus = lab.run(code)
        assert said.startswith("CudaInitializedError CUDA was started under an earlier claim")
        assert said.endswith("start the program again (in a notebook: restart the kernel)")
        assert has_gpus == "True"

    def test_somebody_else_has_them_by_then(self, lab: Lab) -> None:
        program = lab.start("gpuaff.claim_gpus().release(); say(); go_on(); told(refused(1))")
        program.heard()
        holder = lab.holder("claim_gpus(gpus=[0])")
        program.go_on()
        assert f"pid {holder.pid}" in program.heard()

    def test_anything_where_cuda_was_not_started(self, lab: Lab) -> None:
        code = """
        gpuaff.claim_gpus(gpus=[3], placeholder=None).release()
        say(gpuaff.claim_gpus(2))
        """
        assert lab.one(code) == "<Claim of GPU 0, GPU 1>"

    def test_after_one_that_failed_late(self, lab: Lab) -> None:
        """The placeholder had started CUDA already."""
        code = """
        def occupant(number):
            from gpuaff._system import cuda
            cuda.start()
            raise ValueError("no")
        try:
            gpuaff.claim_gpus(gpus=[2], placeholder=occupant)
        except ValueError:
            pass
        told(refused(2))
        say(gpuaff.claim_gpus())
        """
        refused, claim = lab.run(code)
        assert refused.startswith("CudaInitializedError CUDA was started under an earlier claim")
        assert claim == "<Claim of GPU 2>"

    @pytest.mark.case("D9")
    def test_somebody_has_started_cuda_before(self, lab: Lab) -> None:
        said = lab.one("from gpuaff._system import cuda; cuda.start(); told(refused(1))")
        assert said.startswith("CudaInitializedError CUDA is already initialised in this process")


def test_pinned(make_lab: Callable[[Topology], Lab]) -> None:
    """No accelerator is near these fake GPUs, so the claim goes on without CPUs of its own."""
    lab = make_lab(this_machine(1))
    said = lab.one("claim = gpuaff.claim_gpus(pin=True); say(claim.cpus, claim.warnings[0].code)")
    assert said == "None grant-unpinned"
