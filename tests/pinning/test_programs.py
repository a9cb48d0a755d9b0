"""What a pinned process can do, one program a function, over the fake driver."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.pinning.conftest import Machine
from tests.processes import perform
from tests.programs import claimed, pinned

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus", "memory-policies")]

CASES = {
    pinned.a_forked_worker_cuts_the_share_and_not_a_narrowed_mask: pytest.mark.case("C1"),
    pinned.a_helper_on_reserved_cpus_stays: pytest.mark.case("B10"),
    pinned.an_actor_whose_gpus_change: pytest.mark.case("H10"),
    pinned.heirs_of_a_narrowed_main_thread_go_back_to_the_ranks_share: pytest.mark.case("C4"),
    pinned.in_a_forked_child: pytest.mark.case("C10"),
    pinned.the_parent_is_left_alone: pytest.mark.case("B4"),
    pinned.threads_that_are_born_meanwhile_come_too: pytest.mark.case("A13"),
    pinned.those_who_inherited_a_narrowed_mask_come_back: pytest.mark.case("C1"),
}


def programs(module: ModuleType) -> list[object]:
    """The functions of a module that take and return nothing, each with its case."""
    own = [
        one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    found = [one for one in own if one.__annotations__ == {"return": None}]
    return [pytest.param(one, marks=CASES.get(one, ()), id=one.__name__) for one in found]


@pytest.mark.parametrize("program", programs(pinned))
def test_a_pinned_process(driver: FakeDriver, program: Callable[[], None]) -> None:
    perform(program, env=driver.env())


@pytest.mark.needs("mount-namespaces")
@pytest.mark.parametrize("program", programs(claimed))
def test_a_process_with_the_cpus_of_a_claim(machine: Machine, program: Callable[[], None]) -> None:
    """The machine has two GPUs in sysfs: each has half of its CPUs as its domain."""
    perform(program, env=machine.driver.env(), inside=machine.inside)
