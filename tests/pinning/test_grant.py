"""The CPUs that come with a claim, in real processes: this machine's CPUs, GPUs of our own in /sys.

Each GPU has half of this machine's CPUs as its border, as both are near all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests import cpusets, pci_devices, seccomp
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, THREADS, all_hold, run

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus", "mount-namespaces"),
]

START = THREADS + "from gpuaff.pinning.grant import take_grant\n"


class Machine:
    """This machine with two GPUs; ``bordered`` as long as sysfs shows them too."""

    def __init__(self, driver: FakeDriver, inside: tuple[str, ...]) -> None:
        self.driver = driver
        self.inside = inside

    def says(
        self, script: str, *, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> list[str]:
        """The words that a script prints, which must succeed."""
        variables = {**self.driver.env(), **(env or {})}
        done = run(START + script, env=variables, prefix=prefix, inside=self.inside)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def all_hold(self, script: str, *, env: dict[str, str] | None = None) -> None:
        """Run a script all of whose facts must hold."""
        assert self.says(f"{script}\nprint('the end')\n", env=env)[-2:] == ["the", "end"]


@pytest.fixture(scope="module")
def two_in_sysfs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return tuple(pci_devices.gpus(tmp_path_factory.mktemp("machine"), 2))


@pytest.fixture
def machine(driver: FakeDriver, two_in_sysfs: tuple[str, ...]) -> Machine:
    return Machine(driver, two_in_sysfs)


@pytest.fixture
def bare(driver: FakeDriver) -> Machine:
    """Whose GPUs sysfs does not show."""
    return Machine(driver, ())


def test_a_claim_of_a_gpu_has_its_border(machine: Machine) -> None:
    script = """
first = take_grant([0])
bound_to(None)  # born inside
holds(codes(first) == [], first.pinned, first.cpus == now(), everywhere() == {first.cpus})
again = take_grant([0])
holds(again.give_back() == first.cpus == now())
holds(first.give_back() == before, everywhere() == {before})
second = take_grant([1])
holds(second.cpus.isdisjoint(first.cpus), 2 * len(second.cpus) <= len(before) + 1)
holds(second.give_back() == before, second.give_back() == before)
both = take_grant([1, 0, 1])
holds(both.cpus == first.cpus | second.cpus == before)
"""
    machine.all_hold(script)


def test_all_threads_go_and_come_back(machine: Machine) -> None:
    """Also those that somebody has bound: to a part, outside, or just where all go."""
    script = """
low, high = {min(before)}, {max(before)}
free, outside, inside = bound_to(None), bound_to(high), bound_to(low)
made = take_grant([0])
holds(free() == made.cpus, outside() <= made.cpus, inside() == low)
affinity = gpuaff.set_affinity(0, 1)
holds(outside() <= made.cpus, inside() == low)
affinity.restore()
holds(outside() <= made.cpus, inside() == low, free() == made.cpus == now())
made.give_back()
holds(free() == before == now(), outside() == high, inside() == low)
"""
    machine.all_hold(script)


def test_a_thread_that_keeps_a_part(machine: Machine) -> None:
    """It may run inside and outside: the outside is cut, and comes back."""
    script = """
os.sched_setaffinity(0, {min(before)})
wide = bound_to(before)
made = take_grant([0])
holds(codes(made) == [], wide() == made.cpus == {min(before)})
gpuaff.set_affinity(0, 1).restore()
made.give_back()
holds(wide() == before, now() == {min(before)})
"""
    machine.all_hold(script)


def test_a_main_thread_that_was_narrowed(machine: Machine) -> None:
    """By an import: nobody has bound it there on purpose."""
    script = """
both = gpuaff.set_affinity(0, 1)
os.sched_setaffinity(0, {max(before)})
made = take_grant([0])
holds(now() == made.cpus, made.give_back() == both)
"""
    machine.all_hold(script)


def test_cores_for_helpers_are_not_the_claims(machine: Machine) -> None:
    script = """
gpuaff.set_affinity(0, 1, reserve=1)
helper = bound_to({max(before)})
holds(gpuaff.check().ok)
made = take_grant([0])
outside = bound_to({max(before)})
holds(not gpuaff.check().ok)
made.give_back()
holds(helper() == outside() == {max(before)}, gpuaff.check().ok)
"""
    machine.all_hold(script)


def test_a_thread_that_calls_while_it_is_bound(machine: Machine) -> None:
    script = """
high = {max(before)}
def work():
    os.sched_setaffinity(0, high)
    made = take_grant([0])
    there = now() <= made.cpus
    made.give_back()
    return there and now() == high
def inside():
    os.sched_setaffinity(0, high)
    made = take_grant([0, 1])
    there = now() == high
    made.give_back()
    return there and now() == high
holds(in_a_thread(work), in_a_thread(inside), now() == before)
"""
    machine.all_hold(script)


def test_set_affinity_cuts_inside_and_goes_back_to_it(machine: Machine) -> None:
    script = """
made = take_grant([0, 1])
one = gpuaff.set_affinity(0, 2, partition="machine")
print(one < made.cpus, one.restore() == made.cpus, everywhere() == {made.cpus})
made.give_back()
made = take_grant([1])
two = gpuaff.set_affinity(0, 1)
print(two <= made.cpus, codes(two))
with gpuaff.set_affinity(1, 2) as inner:
    print(inner <= made.cpus)
print(two.restore() == made.cpus, gpuaff.check().expected == made.cpus, gpuaff.check().ok)
again = gpuaff.set_affinity(0, 1)
print(made.give_back() == before, everywhere() == {before}, gpuaff.check().expected)
for late in (again, two, one):
    late.restore()
print(everywhere() == {before})
"""
    said = machine.says(script, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert said == [*["True"] * 4, "[]", *["True"] * 6, "None", "True"]


def test_calls_from_before_the_claim(machine: Machine) -> None:
    """Undone inside, they move nobody: what comes back with the claim's end is another mask."""
    script = """
both = gpuaff.set_affinity(0, 1)
made = take_grant([0])
holds(now() == made.cpus)
holds(made.give_back() == both, gpuaff.check().expected == both)
both.restore()

with gpuaff.set_affinity(1, 2) as outer:
    made = take_grant([0])
holds(now() == made.cpus, made.give_back() == before, everywhere() == {before})

outer = gpuaff.set_affinity(1, 2)
made = take_grant([0])
inner = gpuaff.set_affinity(0, 1)
holds(outer.restore() == inner, inner.restore() == made.cpus)
holds(made.give_back() == before, everywhere() == {before})

outer = gpuaff.set_affinity(1, 2)
made = take_grant([0])
holds(outer.reapply() == made.cpus, gpuaff.check().ok, outer.isdisjoint(made.cpus))
made.give_back()
holds(now() == outer, outer.restore() == before)

whole = gpuaff.set_affinity(0, 1)
made = take_grant([0])
holds(whole.reapply() == made.cpus)
made.give_back()
holds(now() == whole)
"""
    machine.all_hold(script)


@pytest.mark.needs("memory-policies")
def test_what_is_set_besides_comes_back(machine: Machine) -> None:
    script = """
from tests import mempolicies
def state():
    return now(), mempolicies.of("self"), os.environ.get("OMP_NUM_THREADS")
first = state()
outer = gpuaff.set_affinity(0, 1, memory="bind", openmp=True)
there = state()
made = take_grant([0])
gpuaff.set_affinity(0, 1)
holds(state()[1:] == first[1:])
made.give_back()
holds(state() == there)
outer.restore()
holds(state() == first)
made = take_grant([0])
inner = gpuaff.set_affinity(0, 1, memory="bind", openmp=True)
made.give_back()
holds(state() == first)
outer = gpuaff.set_affinity(0, 1, memory="bind")
made = take_grant([0])
inner = gpuaff.set_affinity(0, 1, openmp=True)
outer.restore()
holds(state()[2] is not None)
inner.restore()
made.give_back()
holds(state() == first)
"""
    machine.all_hold(script)


def test_a_forked_child_stays_inside(machine: Machine) -> None:
    """It inherits the mask; it can't release the claim, nor leave it by calls from before."""
    script = """
outer = gpuaff.set_affinity(0, 1)
made = take_grant([0])
there = frozenset(now())
inner = gpuaff.set_affinity(0, 1)
def left():
    outer.restore()
    inner.restore()
    made.give_back()
    return now() == there and gpuaff.check().expected == there and outer.reapply() == there
def cut():
    mine = gpuaff.set_affinity(0, 1)
    return mine <= there and mine.restore() == there and outer.restore() == there
def grandchild():
    return child(left) == 0
holds(child(left) == 0, child(cut) == 0, child(grandchild) == 0, now() == there)
inner.restore()
holds(child(left) == 0, child(cut) == 0)
made.give_back()
holds(child(lambda: outer.restore() == before) == 0)
"""
    machine.all_hold(script)


def test_a_mask_that_leaves_part_of_the_border_out(machine: Machine) -> None:
    """For all of a claim's GPUs or for none; strict raises."""
    script = """
os.sched_setaffinity(0, {min(before)})
for gpus in ([1], [0, 1]):
    made = take_grant(gpus)
    holds(codes(made) == ["grant-unpinned"], not made.pinned)
    holds(made.cpus == now() == {min(before)}, made.give_back() == now())
    try:
        take_grant(gpus, strict=True)
        raise AssertionError("it was not refused")
    except gpuaff.GPUAffinityError as error:
        holds("[grant-unpinned;" in str(error), now() == {min(before)})
"""
    machine.all_hold(script)


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
open({str(box.folder / "cpuset.cpus")!r}, "w").write("{CPUS[0]}-{CPUS[1]}")
time.sleep(0.1)
print(now() == before)
"""
        said = machine.says(script, prefix=box.join_command())
    assert said == ["['grant-unpinned']", "False", "True", "True"]


def test_gpus_that_sysfs_does_not_show(bare: Machine) -> None:
    script = """
made = take_grant([0])
holds(codes(made) == ["grant-unpinned"], now() == before == made.cpus)
holds("sysfs" in made.warnings[-1].message)
try:
    take_grant([0], strict=True)
    raise AssertionError("it was not refused")
except gpuaff.GPUAffinityError:
    holds(now() == before)
"""
    bare.all_hold(script)


def test_without_a_driver_the_mask_stays() -> None:
    script = """
from gpuaff.pinning.grant import take_grant
made = take_grant([0])
holds(codes(made)[-1] == "grant-unpinned", not made.pinned, now() == before)
try:
    take_grant([0], strict=True)
    raise AssertionError("it was not refused")
except gpuaff.NoDriverError:
    holds(now() == before)
"""
    all_hold(script, env={})


@pytest.mark.parametrize(
    ("env", "code", "refused"),
    [({"GPUAFF": "off"}, "off", False), ({"GPUAFF_FSROOT": "/nowhere"}, "other-machine", True)],
)
def test_nobody_is_pinned(bare: Machine, env: dict[str, str], code: str, refused: bool) -> None:
    script = """
made = take_grant([0])
print(*codes(made), made.pinned, now() == before, made.give_back() == before)
try:
    take_grant([0], strict=True)
    print("False")
except gpuaff.GPUAffinityError:
    print("True")
"""
    assert bare.says(script, env=env) == [code, "False", "True", "True", str(refused)]


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


def test_wholly_or_not_at_all(machine: Machine) -> None:
    """A log filter raises at the end: everything is as it was, and it can be done again."""
    script = """
import logging
class Fails(logging.Filter):
    def filter(self, record):
        born.append(bound_to(None))  # where the caller is by now
        raise KeyboardInterrupt
born = []
log = logging.getLogger("gpuaff")
log.setLevel("INFO")
log.addFilter(fails := Fails())
low, high = {min(before)}, {max(before)}
threads = [bound_to(mask) for mask in (None, low, high)]
def state():
    return [thread() for thread in threads], now(), gpuaff.check().expected
first = state()
for _ in range(2):
    try:
        take_grant([0])
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        holds(state() == first)
log.removeFilter(fails)
outer = gpuaff.set_affinity(1, 2)
there = state()
log.addFilter(fails)
try:
    take_grant([0])
    raise AssertionError("it was not interrupted")
except KeyboardInterrupt:
    holds(state() == there)
log.removeFilter(fails)
take_grant([0]).give_back()
holds(state() == there)
outer.restore()
holds(state() == first, all(thread() == before for thread in born))
"""
    machine.all_hold(script)


def test_threads_that_are_born_meanwhile(machine: Machine) -> None:
    script = """
stop = threading.Event()
def breed():
    while not stop.is_set():
        threading.Thread(target=stop.wait, daemon=True).start()
        time.sleep(0.0005)
threading.Thread(target=breed, daemon=True).start()
time.sleep(0.02)
made = take_grant([0])
holds(everywhere() == {made.cpus})
made.give_back()
holds(everywhere() == {before})
stop.set()
"""
    machine.all_hold(script)


def test_the_one_line(machine: Machine) -> None:
    script = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
made = take_grant([1, 0])
"""
    said = " ".join(machine.says(script))
    assert said.startswith("gpuaff: claim of GPUs 0-1 -> cpus ")


# Inside a claim, GPUAFF_CLAIM is set.

INSIDE = {"GPUAFF_CLAIM": "v1:3:1:1:GPU-00000000-0000-4000-8000-000000000000"}

SAID = """
made = gpuaff.set_affinity({arguments})
print(made.plan.partition, *codes(made))
"""


@pytest.mark.parametrize(
    ("arguments", "env", "partition"),
    [
        ("0, 2", {}, "machine"),
        ("0, 2, partition='auto'", {}, "machine"),
        ("0, 2, partition='job'", {}, "job"),
        ("0, 2", {"GPUAFF_PARTITION": "job"}, "job"),
        ("0, 2", {"GPUAFF_CLAIM": ""}, "job"),
    ],
)
def test_auto_is_machine_inside_a_claim(
    machine: Machine, arguments: str, env: dict[str, str], partition: str
) -> None:
    said = machine.says(SAID.format(arguments=arguments), env={**INSIDE, **env})
    assert said == [partition]


def test_auto_without_a_border(bare: Machine) -> None:
    assert bare.says(SAID.format(arguments="0, 2"), env=INSIDE) == ["job", "border-unused"]


def test_a_claim_that_cannot_be_read(machine: Machine) -> None:
    said = machine.says(SAID.format(arguments="0, 2"), env={"GPUAFF_CLAIM": "v2:what"})
    assert said == ["job", "claim-unreadable"]


def test_a_rank_that_has_claimed_for_itself(machine: Machine) -> None:
    """It sees one GPU, and of four ranks it is alone there; not so where the launcher claimed."""
    script = """
from gpuaff.launch.inherited import ParentClaim as Claimed
from gpuaff._system.kernel import thread_facts
started = thread_facts(os.getpid(), os.getpid()).started + {later}
claim = Claimed(slot=0, pid=os.getpid(), started=started, uuids=("GPU-1",))
os.environ["GPUAFF_CLAIM"] = str(claim)
made = gpuaff.set_affinity(3, 4)
print(made == take_grant([made.gpu]).cpus, *codes(made))
"""
    env = {"CUDA_VISIBLE_DEVICES": "1"}
    assert machine.says(script.format(later=0), env=env) == ["True"]
    assert "too-few-cores" in machine.says(script.format(later=1), env=env), "its number used again"


@pytest.mark.parametrize(("env", "is_said"), [({}, True), (INSIDE, False)])
def test_a_mask_that_a_claim_has_made_narrow_is_as_it_should_be(
    machine: Machine, env: dict[str, str], is_said: bool
) -> None:
    script = "print(*codes(gpuaff.set_affinity(0, 1, scope='socket')), '.')"
    said = machine.says(script, env=env, prefix=["taskset", "-c", str(CPUS[0])])
    assert ("mask-narrow" in said) is is_said
