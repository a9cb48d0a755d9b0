"""The drop-in's contract: gpu_affinity's names, arguments, result and error."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import pytest

import gpuaff
from gpuaff.compat import gpu_affinity
from tests.compat.peer import package
from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.state import NVML
from tests.processes import CPUS, SRC, printed, run

on_two_gpus = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

ASK = """
    import json, os, sys
    if {theirs}:
        import gpu_affinity
    else:
        from gpuaff.compat import gpu_affinity
    answers = []
    for call in {calls!r}:
        before = os.sched_getaffinity(0)
        try:
            found = eval(f"gpu_affinity.set_affinity({{call}})")
        except gpu_affinity.GPUAffinityError as error:
            assert os.sched_getaffinity(0) == before, call
            answers.append(str(error))
            continue
        assert type(found) is set and found == os.sched_getaffinity(0), call
        answers.append(sorted(found))
        if {anew}:
            os.sched_setaffinity(0, before)
    print(json.dumps(answers))
"""


def answers(
    driver: FakeDriver | None,
    *calls: str,
    theirs: bool = False,
    anew: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What each call gives, all in one process: its CPUs, or the text of its error.

    ``theirs``: of the real gpu_affinity; ``anew``: the mask is put back after each call.
    """
    variables = {**(driver.env() if driver else {}), **(env or {})}
    if theirs:
        variables["PYTHONPATH"] = f"{SRC}:{package()}"
    script = ASK.format(theirs=theirs, calls=list(calls), anew=anew)
    found: list[Any] = json.loads(printed(script, env=variables))
    return found


MODES = "ALL SINGLE SINGLE_UNIQUE UNIQUE_INTERLEAVED UNIQUE_CONTIGUOUS"


def answer(driver: FakeDriver | None, call: str, **env: str) -> Any:
    return answers(driver, call, env=env)[0]


class TestNames:
    def test_the_module_has_what_scripts_import(self) -> None:
        names = ["GPUAffinityError", "Mode", "Multithreading", "Scope", "set_affinity"]
        assert sorted(gpu_affinity.__all__) == names
        assert all(hasattr(gpu_affinity, name) for name in names)
        assert gpu_affinity.GPUAffinityError is gpuaff.GPUAffinityError

    def test_arguments(self) -> None:
        parameters = inspect.signature(gpu_affinity.set_affinity).parameters.values()
        assert [(p.name, p.kind.name, p.default) for p in parameters] == [
            ("gpu_id", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
            ("nproc_per_node", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
            ("mode", "KEYWORD_ONLY", gpu_affinity.Mode.UNIQUE_CONTIGUOUS),
            ("scope", "KEYWORD_ONLY", gpu_affinity.Scope.NODE),
            ("multithreading", "KEYWORD_ONLY", gpu_affinity.Multithreading.ALL_LOGICAL),
            ("balanced", "KEYWORD_ONLY", True),
            ("min_physical_cores", "KEYWORD_ONLY", 1),
            ("max_physical_cores", "KEYWORD_ONLY", None),
        ]

    def test_enums(self) -> None:
        enums: dict[Any, str] = {
            gpu_affinity.Mode: MODES,
            gpu_affinity.Scope: "NODE SOCKET",
            gpu_affinity.Multithreading: "ALL_LOGICAL SINGLE_LOGICAL",
        }
        for words, members in enums.items():
            for name in members.split():
                assert words(name.lower()) is words[name]
                assert str(words[name]) == name.lower()

    def test_both_names_catch_the_error(self) -> None:
        assert gpu_affinity.GPUAffinityError is gpuaff.GPUAffinityError


class TestErrors:
    pytestmark = on_two_gpus

    @pytest.mark.case("gpu-affinity-rule-6")
    def test_what_cannot_be_meant(self, driver: FakeDriver) -> None:
        said = {
            "2, 2": "gpu_id=2: expected a whole number from 0 to 1, as there are 2 processes",
            "-1, 2": "gpu_id=-1: expected a whole number from 0 to 1, as there are 2 processes",
            "0, 0": "nproc_per_node=0: expected a whole number from 1 to 65535",
            "0, 2, scope='x'": "scope='x': expected one of node, socket",
            "0, 2, multithreading=None": "multithreading=None: expected one of all_logical, "
            "single_logical",
            "0, 2, max_physical_cores=0": "max_physical_cores=0: expected a whole number from 1 "
            "to 65535",
            "0, 2, min_physical_cores=2, max_physical_cores=1": "min_physical_cores=2: expected at "
            "most max_physical_cores=1",
        }
        assert answers(driver, *said) == list(said.values())

    @pytest.mark.case("gpu-affinity-rule-5")
    def test_too_many_processes_or_cores(self, driver: FakeDriver) -> None:
        visible = "nproc_per_node=3, but only GPUs 0-1 are visible: "
        least = len(CPUS) + 1
        few = f"requested min_physical_cores={least}, but rank "
        expected = {
            **dict.fromkeys(("0, 3, mode='all'", "2, 3, mode='single'"), visible),
            **{
                f"{call}, min_physical_cores={least}": few
                for call in ("0, 2", "1, 2", "1, 2, mode='all'")
            },
        }
        for said, start in zip(answers(driver, *expected), expected.values(), strict=True):
            assert said.startswith(start)
        hidden = answer(driver, "0, 2, mode='all'", CUDA_VISIBLE_DEVICES="1")
        assert hidden.startswith("nproc_per_node=2, but only GPUs 1 are visible: ")

    def test_too_few_cores_to_have_one_alone(self, driver: FakeDriver) -> None:
        for gpu in (0, 1):
            driver.set_cpus(gpu, node=CPUS[:1], socket=CPUS[:1])
        first, second = (answer(driver, f"{r}, 2, mode='single_unique'") for r in (0, 1))
        assert first == CPUS[:1]
        assert second.startswith("rank 1 must share cores: ")

    @pytest.mark.case("gpu-affinity-rule-6", "F5")
    def test_no_driver(self, driver: FakeDriver) -> None:
        driver.refuse(NVML.LIB_RM_VERSION_MISMATCH)
        said = answer(driver, "0, 2")
        assert "reboot" in said

    @pytest.mark.case("gpu-affinity-rule-6", "visible-devices")
    def test_no_visible_gpu(self, driver: FakeDriver) -> None:
        for value in ("", "-1", "0,0"):
            assert "CUDA_VISIBLE_DEVICES" in answer(driver, "0, 1", CUDA_VISIBLE_DEVICES=value)

    @pytest.mark.case("gpu-affinity-rule-6")
    def test_twice_is_once_also_with_a_refused_call_between(self, driver: FakeDriver) -> None:
        first, refused, last = answers(driver, "0, 2", "0, 3, mode='all'", "0, 2")
        assert isinstance(refused, str)
        assert first == last

    def test_none_is_no_number(self, driver: FakeDriver) -> None:
        """To gpuaff it would mean: ask the launcher."""
        for call in ("None, None", "0, None"):
            done = run(ASK.format(theirs=False, calls=[call], anew=False), env=driver.env())
            assert done.stderr.splitlines()[-1].startswith("TypeError: ")


class TestAnswers:
    pytestmark = on_two_gpus

    def test_unusual_values_that_gpu_affinity_took(self, driver: FakeDriver) -> None:
        unusual = ["balanced=0", "min_physical_cores=0", "min_physical_cores=-3"]
        unusual.append("max_physical_cores=10**9")
        whole, *found = answers(driver, "0, 1", *(f"0, 1, {option}" for option in unusual))
        assert found == [whole] * len(unusual)

    @pytest.mark.case("gpu-affinity-rule-6", "A1", "F1")
    def test_what_the_driver_does_not_tell_is_no_error(self, driver: FakeDriver) -> None:
        shares = answers(driver, "0, 2", "1, 2")
        driver.set_cpus(0, node=None, socket=None)
        driver.set_cpus(1, node=[], socket=[])
        assert answers(driver, "0, 2", "1, 2") == shares

    @pytest.mark.case("gpu-affinity-rule-6")
    def test_nvml_is_shut_down(self, driver: FakeDriver) -> None:
        answers(driver, "0, 2", "5, 2", "1, 3")
        assert driver.inits == driver.shutdowns > 0

    def test_variables_change_nothing_that_has_an_argument(self, driver: FakeDriver) -> None:
        names = "MODE MAX_PHYSICAL_CORES MIN_PHYSICAL_CORES MULTITHREADING PARTITION SCOPE"
        env = {f"GPUAFF_{name}": "nonsense" for name in names.split()}
        calls = ("0, 1", "0, 1, max_physical_cores=1")
        assert answers(driver, *calls, env=env) == answers(driver, *calls)

    def test_it_can_be_switched_off_from_outside(self, driver: FakeDriver) -> None:
        assert answer(driver, "0, 2", GPUAFF="off") == CPUS
        assert answer(None, "0, 2", GPUAFF="off") == CPUS

    def test_strictness_comes_from_outside(self, driver: FakeDriver) -> None:
        said = answer(driver, "0, 2", GPUAFF_STRICT="perhaps")
        assert said.startswith("GPUAFF_STRICT='perhaps': expected one of ")

    @pytest.mark.needs("gpu_affinity")
    def test_the_real_one_does_the_same(self, driver: FakeDriver) -> None:
        options = [
            f"mode=gpu_affinity.Mode.{mode}, scope=gpu_affinity.Scope.{scope}"
            for mode in MODES.split()
            for scope in ("NODE", "SOCKET")
        ]
        calls = [f"{rank}, 2, {more}" for rank in (0, 1) for more in options]
        assert answers(driver, *calls, anew=True) == answers(driver, *calls, anew=True, theirs=True)
