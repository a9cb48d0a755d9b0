"""The CPUs that come with a claim, in real processes: this machine's CPUs, GPUs of our own in /sys.

Each GPU has half of this machine's CPUs as its border, as both are near all of them.
"""

from __future__ import annotations

import pytest

from tests import cpusets, seccomp
from tests.pinning.conftest import Machine
from tests.processes import CPUS, run

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus", "mount-namespaces"),
]


@pytest.mark.needs("cpusets")
def test_a_cpuset_that_loses_part_of_the_border(machine: Machine) -> None:
    with cpusets.cpuset(CPUS[:1]) as box:
        script = (
            "made = take_grant([1])\nprint(codes(made), made.pinned, everywhere() == {made.cpus})"
        )
        said = machine.says(script, prefix=box.join_command())
    assert said == ["['grant-unpinned']", "False", "True"]


@pytest.mark.needs("cpusets")
def test_a_cpuset_that_loses_it_during_the_call(machine: Machine) -> None:
    with cpusets.cpuset(CPUS) as box:
        script = f"""
from gpuaff.pinning import grant
observe, first = grant.observe, []
def shrinking(**asked):
    found = observe(**asked)
    if not first:
        first.append(open({str(box.folder / "cpuset.cpus")!r}, "w").write("{CPUS[0]}"))
        time.sleep(0.1)
    return found
grant.observe = shrinking
made = take_grant([0, 1])
print(codes(made), made.pinned, now() == {{{CPUS[0]}}})
"""
        said = machine.says(script, prefix=box.join_command())
    assert said == ["['grant-unpinned']", "False", "True"]


@pytest.mark.parametrize(
    ("env", "code", "error"),
    [
        ({}, "grant-unpinned", ["GPUAffinityError"]),
        ({"LD_LIBRARY_PATH": ""}, "grant-unpinned", ["NoDriverError"]),
        ({"GPUAFF": "off"}, "off", []),
        ({"GPUAFF_FSROOT": "/nowhere"}, "other-machine", ["GPUAffinityError"]),
    ],
    ids=["not in sysfs", "no driver", "off", "another machine"],
)
def test_where_the_mask_stays(
    bare: Machine, env: dict[str, str], code: str, error: list[str]
) -> None:
    script = """
made = take_grant([0])
holds(not made.pinned, now() == before == made.cpus == made.give_back())
try:
    take_grant([0], strict=True)
except gpuaff.GpuaffError as error:
    print(type(error).__name__)
print(codes(made)[-1], now() == before)
"""
    assert bare.says(script, env=env) == [*error, code, "True"]


@pytest.mark.parametrize("call", [203, 204])
def test_a_seccomp_filter_refuses(bare: Machine, call: int) -> None:
    """sched_setaffinity, sched_getaffinity of x86-64."""
    script = """
import gpuaff
from gpuaff.pinning.grant import take_grant
made = take_grant([0])
print([warning.code for warning in made.warnings], made.pinned)
made.give_back()
"""
    done = run(script, env=bare.driver.env(), prefix=seccomp.refusing(1, call))
    assert done.returncode == 0, done.stderr
    expected = "['grant-unpinned'] False" if call == 203 else "['pin-failed'] False"
    assert done.stdout.strip() == expected


# Inside a claim, GPUAFF_CLAIM is set.

INSIDE = {"GPUAFF_CLAIM": "v1:3:1:1:GPU-00000000-0000-4000-8000-000000000000"}

SAID = """
made = gpuaff.set_affinity({arguments})
print(made.plan.partition, *codes(made))
"""


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ("0, 2", {}, "machine"),
        ("0, 2, partition='auto'", {}, "machine"),
        ("0, 2, partition='job'", {}, "job"),
        ("0, 2", {"GPUAFF_PARTITION": "job"}, "job"),
        ("0, 2", {"GPUAFF_CLAIM": ""}, "job"),
        ("0, 2", {"GPUAFF_CLAIM": "v2:what"}, "job claim-unreadable"),
    ],
)
def test_auto_is_machine_inside_a_claim(
    machine: Machine, arguments: str, env: dict[str, str], expected: str
) -> None:
    said = machine.says(SAID.format(arguments=arguments), env={**INSIDE, **env})
    assert said == expected.split()


def test_auto_without_a_border(bare: Machine) -> None:
    assert bare.says(SAID.format(arguments="0, 2"), env=INSIDE) == ["job", "border-unused"]


def test_a_rank_that_has_claimed_for_itself(machine: Machine) -> None:
    """It sees one GPU, and of four ranks it is alone there; not so where the launcher claimed."""
    script = """
from gpuaff.launch.inherited import ParentClaim as Claimed
from gpuaff._system.kernel import thread_facts
started = thread_facts(os.getpid(), os.getpid()).started
claim = Claimed(slot=0, pid=os.getpid(), started=started, uuids=("GPU-1",))
os.environ["GPUAFF_CLAIM"] = str(claim)
made = gpuaff.set_affinity(3, 4)
print(made == take_grant([made.gpu]).cpus, *codes(made))
"""
    assert machine.says(script, env={"CUDA_VISIBLE_DEVICES": "1"}) == ["True"]


@pytest.mark.parametrize(("env", "is_said"), [({}, True), (INSIDE, False)])
def test_a_mask_that_a_claim_has_made_narrow_is_as_it_should_be(
    machine: Machine, env: dict[str, str], is_said: bool
) -> None:
    script = "print(*codes(gpuaff.set_affinity(0, 1, scope='socket')), '.')"
    said = machine.says(script, env=env, prefix=["taskset", "-c", str(CPUS[0])])
    assert ("mask-narrow" in said) is is_said
