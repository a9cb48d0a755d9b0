"""What occupies claimed GPUs: all or none, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.claims.placeholder import Placeholder, kind_of
from gpuaff.errors import InvalidOptionError
from tests.fakedriver.driver import FakeDriver

STAND_INS = str(Path(__file__).parent / "stand_in")
"""Modules that use CUDA as torch, TensorFlow, pycuda and CuPy do, as far as placeholders go."""

UUIDS = tuple(f"GPU-00000000-0000-4000-8000-{place:012x}" for place in range(2))

BEGIN = f"""
import os, signal, sys
from gpuaff.claims.placeholder import cuda_already_initialized
from gpuaff._system import cuda
from tests.programs.occupying import *
UUIDS = {UUIDS}
"""


def lines(driver: FakeDriver, program: str, **env: str) -> list[str]:
    """What a program on the fake machine prints."""
    return driver.run(BEGIN + program, env=env).stdout.splitlines()


class TestWhatMayBeAskedFor:
    @pytest.mark.parametrize("kind", [*Placeholder, print, None])
    def test_a_word_or_its_member_a_function_or_nothing(self, kind: object) -> None:
        assert kind_of(kind) is kind
        if isinstance(kind, Placeholder):
            assert kind_of(kind.value) is kind

    @given(
        st.text().filter(lambda text: text not in list(Placeholder))
        | st.sampled_from([0, 1, True, 2.5, b"torch", ("torch",), object()])
    )
    def test_nothing_else(self, value: object) -> None:
        with pytest.raises(InvalidOptionError, match="expected one of context, torch") as caught:
            kind_of(value)
        assert caught.value.option == "placeholder"

    def test_a_release_that_cannot_be_called(self) -> None:
        def occupier(_: int) -> None: ...

        occupier.release = 5  # type: ignore[attr-defined]
        with pytest.raises(
            InvalidOptionError, match=r"^placeholder.release=5: expected a function"
        ):
            kind_of(occupier)

    @pytest.mark.parametrize(("word", "meant"), [("pytorch", "torch"), ("Context", "context")])
    def test_a_word_that_is_nearly_one(self, word: str, meant: str) -> None:
        with pytest.raises(InvalidOptionError, match=rf"; did you mean {meant}\?$"):
            kind_of(word)


@pytest.mark.fake_driver
class TestContexts:
    @pytest.mark.parametrize(
        ("code", "name", "advice"),
        [
            (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "its compute mode allows one process"),
            (2, "CUDA_ERROR_OUT_OF_MEMORY", "its memory is full"),
        ],
    )
    def test_the_second_cannot_be_had(
        self, driver: FakeDriver, code: int, name: str, advice: str
    ) -> None:
        driver.fail("cuDevicePrimaryCtxRetain", code, gpu=1)
        said, on = lines(driver, 'print(refused("context", UUIDS)); print(on_gpus())')
        begin = f"placeholder='context' could not occupy {UUIDS[1]} (CUDA device 1): "
        assert said.startswith(begin + f"cuDevicePrimaryCtxRetain returned {code} ({name}")
        assert advice in said
        assert on == "[]"

    @pytest.mark.parametrize(
        ("code", "advice"),
        [(100, "CUDA_VISIBLE_DEVICES"), (803, "reboot")],
    )
    def test_cuda_does_not_start(self, driver: FakeDriver, code: int, advice: str) -> None:
        driver.fail("cuInit", code)
        (said,) = lines(driver, 'print(refused("context", UUIDS))')
        assert said.startswith(
            f"placeholder='context': CUDA does not start: cuInit returned {code}"
        )
        assert advice in said

    def test_cuda_shows_other_gpus(self, driver: FakeDriver) -> None:
        driver.watch("cuDevicePrimaryCtxRetain")
        program = """
print(refused("context", UUIDS[::-1]))
print(refused("context", UUIDS[:1]))
print(refused("context", UUIDS[:1], ordinals=(1,)))
"""
        first, second = UUIDS
        for said, claimed in zip(
            lines(driver, program),
            (
                f"{second} as device 0, {first} as device 1",
                f"{first} as device 0",
                f"{first} as de",
            ),
            strict=True,
        ):
            assert said.startswith(f"claimed was {claimed}")
            shown = f"{first[4:]} as device 0, {second[4:]} as device 1"
            assert f"but CUDA shows this process {shown}: " in said
        assert driver.calls("cuDevicePrimaryCtxRetain") == 0


@pytest.mark.fake_driver
class TestFrameworks:
    @pytest.mark.parametrize(
        ("kind", "first", "after"),
        [
            ("torch", "1 zero on cuda:0", "[0, 1]"),
            ("cupy", "1 zero on 0", "[0, 1]"),
            ("tensorflow", "namespace(values=[1.0]", "[0, 1]"),
            ("pycuda", "<pycuda.driver.Context", "[]"),
        ],
    )
    def test_both_gpus_are_taken(
        self, driver: FakeDriver, kind: str, first: str, after: str
    ) -> None:
        """Only pycuda lets its contexts go; and none of them is current when the process ends."""
        program = f"""
occupied = Occupied("{kind}", UUIDS)
print(on_gpus(), len(occupied.held))
print(occupied.held[0])
occupied.release()
print(on_gpus())
"""
        found = lines(driver, program, PYTHONPATH=STAND_INS)
        assert found[0] == "[0, 1] 2"
        assert found[1].startswith(first)
        assert found[2] == after

    def test_pycuda_contexts_that_are_still_held_at_the_end(self, driver: FakeDriver) -> None:
        program = 'occupied = Occupied("pycuda", UUIDS); print("done")'
        assert lines(driver, program, PYTHONPATH=STAND_INS) == ["done"]

    def test_a_tensor_that_is_put_elsewhere(self, driver: FakeDriver) -> None:
        env = {"PYTHONPATH": STAND_INS, "STAND_IN_WITHOUT_CUDA": "1"}
        (said,) = lines(driver, 'print(refused("tensorflow", UUIDS))', **env)
        assert "TensorFlow put it on /job:localhost/replica:0/task:0/device:CPU:0" in said

    def test_a_function_that_started_cuda_with_other_gpus(self, driver: FakeDriver) -> None:
        program = """
from stand_in_cuda import release, retain
retain.release = lambda _: print("released")
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
print(refused(retain, UUIDS[1:]))
"""
        released, said = lines(driver, program, PYTHONPATH=STAND_INS)
        assert released == "released"
        assert said.startswith(f"claimed was {UUIDS[1]} as device 0, but CUDA shows this process")

    @pytest.mark.parametrize("kind", ["tensorflow", "pycuda", "cupy"])
    def test_one_that_is_not_installed(self, driver: FakeDriver, kind: str) -> None:
        program = f"""
class Hides:
    @staticmethod
    def find_spec(name, *_):
        if name == "{kind}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hides)
print(refused("{kind}", UUIDS))
"""
        (said,) = lines(driver, program)
        assert said.startswith(f"placeholder='{kind}': the Python module {kind} is not installed")
        assert f"pip install {kind}" in said

    def test_one_that_is_broken(self, driver: FakeDriver, tmp_path: Path) -> None:
        (tmp_path / "cupy.py").write_text("import a_module_that_is_nowhere")
        (said,) = lines(driver, 'print(refused("cupy", UUIDS))', PYTHONPATH=str(tmp_path))
        begin = "placeholder='cupy': the Python module cupy cannot be imported (No module named"
        assert said.startswith(begin)

    @pytest.mark.needs("torch")
    @pytest.mark.slow
    def test_the_real_torch_without_cuda(self, driver: FakeDriver) -> None:
        driver.watch("cuInit")
        program = """
import torch
if torch.version.cuda is None:
    print(refused("torch", UUIDS))
"""
        for said in lines(driver, program):
            assert said.startswith("placeholder='torch': this torch (")
            assert "was built without CUDA" in said
            assert driver.calls("cuInit") == 0


@pytest.mark.fake_driver
@pytest.mark.case("D9")
class TestCudaWasInitialisedBeforeTheClaim:
    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("", "None"),
            ("import torch", "None"),
            ("import types; sys.modules['torch'] = types.ModuleType('torch')", "None"),
            ("import torch; torch.cuda.is_available()", "torch.cuda.is_available() (unless"),
            (
                "cuda.start(); sys.modules.update(jax=sys, torch=sys)",
                "usual causes: torch.cuda.is_available()",
            ),
            ("cuda.start(); sys.modules['jax'] = sys", "causes: jax.devices() or a first array"),
            ("cuda.start()", "an import or call has done it"),
            # It may use a libcuda under another name.
            ("import torch; torch.cuda.is_initialized = lambda: True", "causes: torch.cuda"),
        ],
    )
    def test_it_is_said(self, driver: FakeDriver, program: str, said: str) -> None:
        program += "\nprint(cuda_already_initialized())"
        (line,) = lines(driver, program, PYTHONPATH=STAND_INS)
        assert said in line
        assert line == "None" or line.startswith("CUDA is already initialised in this process")
