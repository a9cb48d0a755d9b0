"""A claim inside a claim: it takes from what encloses it, and never from the machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuaff.launch.inherited import ParentClaim, claim_in_environment
from tests.claim_lab import Lab

pytestmark = pytest.mark.fake_driver


def test_each_rank_gets_another_one(lab: Lab) -> None:
    """Not the machine's first GPUs, and with no descriptor of the claim (as under torchrun)."""
    _, env = lab.enclosing("gpus=[3, 1], placeholder=None")
    ranks = [lab.start("say(*indices(gpuaff.claim_gpus())); go_on()", **env) for _ in range(2)]
    assert sorted(rank.heard() for rank in ranks) == ["1", "3"]
    assert lab.used() == [1, 3]
    said = lab.refused("1", **env)
    assert said.startswith("GpusBusyError requested 1 GPU; none is free; the claim in which ")
    assert " | GPU 3: claimed inside this claim by " in said
    assert f"pid {ranks[0].pid}" in said
    assert f"pid {ranks[1].pid}" in said
    assert lab.one("say(gpuaff.claim_gpus(2))") == "<Claim of GPU 0, GPU 2>"


def test_a_rank_that_waits(lab: Lab) -> None:
    _, env = lab.enclosing("gpus=[2], placeholder=None")
    first = lab.start("say(*indices(gpuaff.claim_gpus())); go_on()", **env)
    assert first.heard() == "2"
    second = lab.start("say(*indices(gpuaff.claim_gpus(wait=30, on_wait=say)))", **env)
    assert second.heard().startswith("Waiting(position=0, ")
    first.kill()
    assert second.end() == "2\n"


def test_it_cannot_have_more_than_the_claim(lab: Lab) -> None:
    _, env = lab.enclosing("gpus=[2, 3], placeholder=None")
    said = lab.refused("3, wait=None", **env)
    assert said == (
        "NotEnoughGpusError requested 3 GPUs; the claim in which this process runs has 2 GPUs"
    )
    narrowed = {**env, "CUDA_VISIBLE_DEVICES": "2"}
    said = lab.refused("2", **narrowed)
    assert said.startswith("NotEnoughGpusError requested 2 GPUs; the claim in which this proc")
    assert "of which it may use 1: CUDA_VISIBLE_DEVICES='2' shows 1 GPU of the 4 here" in said
    said = lab.refused("gpus=[0]", **env)
    assert said.startswith("NotEnoughGpusError requested 1 GPU; this process may not use GPU 0")


def test_by_name_and_as_many_as_there_are(lab: Lab) -> None:
    _, env = lab.enclosing("gpus=[2, 3], placeholder=None")
    assert lab.one("say(gpuaff.claim_gpus(gpus=[3]))", **env) == "<Claim of GPU 3>"
    assert lab.one("say(gpuaff.claim_gpus('auto'))", **env) == "<Claim of GPU 2, GPU 3>"


def test_nested_in_nested(lab: Lab) -> None:
    _, env = lab.enclosing("gpus=[1, 2, 3], placeholder=None")
    _, inner_env = lab.enclosing("2, placeholder=None", **env)
    assert inner_env["CUDA_VISIBLE_DEVICES"] == "1,2"
    first = lab.start("say(*indices(gpuaff.claim_gpus())); go_on()", **inner_env)
    assert first.heard() == "1"
    assert lab.one("say(*indices(gpuaff.claim_gpus()))", **inner_env) == "2"
    assert "has 2 GPUs" in lab.refused("3", **inner_env)
    assert lab.one("say(*indices(gpuaff.claim_gpus()))", **env) == "3"


def test_given_back_and_claimed_again(lab: Lab) -> None:
    _, env = lab.enclosing("gpus=[3], placeholder=None")
    code = """
    before = state()
    for _ in range(3):
        gpuaff.claim_gpus(pin=True).release()
    assert not differs(before, state()), differs(before, state())
    """
    assert lab.run(code, **env) == []
    assert lab.one("say(*indices(gpuaff.claim_gpus()))", **env) == "3"


def test_its_owner_is_gone(lab: Lab) -> None:
    """The variable is left over: the GPUs may be somebody else's by now."""
    program, env = lab.enclosing("gpus=[3], placeholder=None")
    program.kill()
    said = lab.refused("1", **env)
    assert said.startswith("ClaimError GPUAFF_CLAIM says that this process runs inside a claim of ")
    assert f"process {program.pid}, which is over" in said


@pytest.mark.parametrize(
    "change",
    [
        lambda claim: claim._replace(pid=claim.pid + 1),
        lambda claim: claim._replace(started=claim.started + 1),
        lambda claim: claim._replace(slot=99999),
        lambda claim: claim._replace(uuids=(*claim.uuids, "GPU-0")),
        # By the order a rank would take another one's GPU: the place in the list is what is locked.
        lambda claim: claim._replace(uuids=claim.uuids[::-1]),
    ],
)
def test_what_the_registry_does_not_have(
    lab: Lab, change: Callable[[ParentClaim], ParentClaim]
) -> None:
    """Another process may have taken the slot since, or somebody has changed the variable."""
    program, env = lab.enclosing("gpus=[3, 1], placeholder=None")
    claim, _ = claim_in_environment(env.get)
    assert claim is not None
    said = lab.one("told(refused(1))", **{**env, "GPUAFF_CLAIM": str(change(claim))})
    assert said.startswith("ClaimError GPUAFF_CLAIM says that this process runs inside a claim of ")
    assert program.end() == ""


@pytest.mark.parametrize("text", ["yes", "v2:0:1:2:GPU-0", "v1:0:1:2:", "v1:x:1:2:GPU-0"])
def test_a_variable_that_cannot_be_read(lab: Lab, text: str) -> None:
    said = lab.refused("1", GPUAFF_CLAIM=text)
    assert said.startswith(f"ClaimError GPUAFF_CLAIM='{text}' is not what a claim sets")


def test_forked_ranks(lab: Lab) -> None:
    code = """
    claim = gpuaff.claim_gpus(gpus=[1, 3], placeholder=None)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            mine = gpuaff.claim_gpus(1)
            say(mine.gpus[0].index, mine.gpus[0].local, gpuaff.current_claim() is mine)
            go_on()
            os._exit(0)
        children.append(child)
    [os.waitpid(child, 0) for child in children]
    """
    program = lab.start(code)
    assert {program.heard(), program.heard()} == {"1 0 True", "3 0 True"}
    assert lab.used() == [1, 3]
    assert lab.driver.double_holdings() == []


def test_a_claim_outlives_the_one_that_it_is_inside_of(lab: Lab) -> None:
    """Its process has died, and its ranks live: nobody gets what they have, inside or outside."""
    outer, env = lab.enclosing("gpus=[1, 2], placeholder=None")
    inner, inner_env = lab.enclosing("gpus=[2], placeholder=None", **env)
    rank = lab.start("say(*indices(gpuaff.claim_gpus(placeholder=None))); go_on()", **inner_env)
    assert rank.heard() == "2"
    inner.kill()
    said = lab.refused("2", **env)
    assert "GPU 2: claimed inside this claim by " in said
    assert f"(pid {rank.pid})" in said
    assert lab.one("say(*indices(gpuaff.claim_gpus()))", **env) == "1"
    outer.kill()
    said = lab.refused("4")
    assert f"(pid {rank.pid})" in said
    assert lab.one("say(gpuaff.claim_gpus(3))") == "<Claim of GPU 0, GPU 1, GPU 3>"
