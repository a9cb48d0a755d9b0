"""safe_gpu's drop-in: old scripts as real processes, with the library itself as the measure."""

from __future__ import annotations

import inspect
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import pytest

from gpuaff.compat import safe_gpu
from gpuaff.errors import GpuaffError
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import NVML
from tests.processes import SRC, Program, printed, run, stopped

SCRIPTS = Path(__file__).parent / "old_scripts" / "safe_gpu"
STAND_INS = f"{SCRIPTS / 'stand_in'}:{Path(__file__).parents[1] / 'claims' / 'stand_in'}"
NEW = {
    "from safe_gpu import safe_gpu\n": "from gpuaff.compat import safe_gpu\n",
    "from safe_gpu.safe_gpu import ": "from gpuaff.compat.safe_gpu import ",
    "import safe_gpu.safe_gpu as ": "import gpuaff.compat.safe_gpu as ",
}

pytestmark = pytest.mark.fake_driver

BEGIN = """
import logging, os, sys
from gpuaff.compat import safe_gpu
from gpuaff.errors import *
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
"""


@pytest.fixture
def env(driver: FakeDriver, tmp_path: Path) -> dict[str, str]:
    """What makes a process see the fake machine, with lock files of its own."""
    return {
        **driver.env(smi=True),
        "PYTHONPATH": f"{SRC}:{STAND_INS}",
        "GPUAFF_LOCK_DIR": str(tmp_path / "locks"),
        "GPUAFF_SAFE_GPU": str(tmp_path / "safe_gpu" / "lock"),
    }


@pytest.fixture(params=["drop-in", pytest.param("original", marks=pytest.mark.needs("safe_gpu"))])
def start(request: pytest.FixtureRequest, env: dict[str, str]) -> Iterator[Callable[..., Program]]:
    """Starts an old script, with the drop-in and with the library that it was written for."""
    with ExitStack() as stack:

        def start(name: str, *arguments: str, **variables: str) -> Program:
            text = (SCRIPTS / name).read_text("utf-8")
            if request.param == "drop-in":
                ((old, new),) = [pair for pair in NEW.items() if pair[0] in text]
                text = text.replace(old, new)
            else:
                lock = env["GPUAFF_SAFE_GPU"]
                text = f"import safe_gpu.safe_gpu as it; it.LOCK_FILENAME = {lock!r}\n{text}"
            text = f"import sys; sys.argv = {[name, *arguments]}\n{text}"
            return stack.enter_context(stopped(text, env={**env, **variables}))

        yield start


def rest_of(script: Program) -> str:
    """What a script still says on standard error until its end, which comes now."""
    script.kill()
    return script.errors()


# ---- old scripts -----------------------------------------------------------------------------


def test_at_the_top(start: Callable[..., Program]) -> None:
    first, second = start("top.py"), None
    assert first.heard() == "on [0], visible: 0"
    second = start("top.py")
    assert second.heard() == "on [1], visible: 1"
    third = start("top.py")
    assert third.wait(30) == 1
    busy = [line for line in rest_of(third).splitlines() if not line.startswith("  ")][-1]
    assert busy.startswith(("RuntimeError: ", "gpuaff.errors.GpusBusy"))
    lines = rest_of(second).splitlines()
    assert [line for line in lines if line.startswith("INFO")] == [
        "INFO acquiring lock",
        "INFO lock acquired",
        "INFO Set CUDA_VISIBLE_DEVICES=1",
        "INFO lock released",
    ]


def test_one_process_for_each_gpu(start: Callable[..., Program]) -> None:
    ranks = [start("ranks.py", OMPI_COMM_WORLD_LOCAL_RANK=str(rank)) for rank in (0, 1)]
    said = [rank.heard().split() for rank in ranks]
    assert [rank for rank, _ in said] == ["0", "1"]
    assert {gpu for _, gpu in said} == {"0", "1"}


def test_a_placeholder_and_an_owner_of_their_own(
    start: Callable[..., Program], driver: FakeDriver
) -> None:
    script = start("own_placeholder.py")
    assert script.heard() == "0 1 [0, 1]"
    assert driver.contexts(0) == driver.contexts(1) == {script.pid}
    script.go_on()
    assert {script.heard(), script.heard()} == {"let 0 go", "let 1 go"}
    assert script.heard() == "[0, 1]"
    assert not driver.contexts(0) | driver.contexts(1)
    assert rest_of(script).splitlines() == [
        "acquiring lock",
        "lock acquired",
        "Set CUDA_VISIBLE_DEVICES=0,1",
        "lock released",
        "Releasing placeholder on CUDA device: 0",
        "Releasing placeholder on CUDA device: 1",
    ]


def test_are_there_gpus(start: Callable[..., Program], driver: FakeDriver, tmp_path: Path) -> None:
    """Without nvidia-smi safe_gpu let FileNotFoundError through."""
    scripts = [start("available.py") for _ in range(3)]
    assert sorted(script.heard() for script in scripts) == ["cuda", "cuda", "none free"]
    driver.refuse(NVML.DRIVER_NOT_LOADED)
    for variables in ({}, {"PATH": str(tmp_path)}):
        assert start("available.py", **variables).heard() == "cpu"


# ---- the drop-in itself ----------------------------------------------------------------------


def said(env: Mapping[str, str], script: str) -> list[str]:
    """What a script that must succeed printed and logged."""
    return printed(BEGIN + script, env=env).splitlines()


LOCKED = ["acquiring lock", "lock acquired"]

# A script, and the last lines that it prints and logs.
SAID: dict[str, tuple[str, list[str]]] = {
    "a second claim is refused, and the first stays": (
        """
safe_gpu.claim_gpus()
first = safe_gpu.gpu_owner
try:
    safe_gpu.claim_gpus()
except AlreadyClaimedError as error:
    print("refused:", isinstance(error, RuntimeError), safe_gpu.gpu_owner is first)
print(first.devices_taken, os.environ["CUDA_VISIBLE_DEVICES"])
""",
        ["lock released", "refused: True True", "[0] 0"],
    ),
    "none hides them all": (
        """
safe_gpu.claim_gpus(0)
print(safe_gpu.gpu_owner.devices_taken, repr(os.environ["CUDA_VISIBLE_DEVICES"]))
""",
        [*LOCKED, "Set CUDA_VISIBLE_DEVICES=", "lock released", "[] ''"],
    ),
    "the default is a context without any framework": (
        """
safe_gpu.claim_gpus()
print("torch" in sys.modules, len(safe_gpu.gpu_owner.placeholders))
""",
        ["False 1"],
    ),
    "PyCUDA's context is current, as scripts expect it that launch kernels at once": (
        """
safe_gpu.claim_gpus(placeholder_fn=safe_gpu.PyCudaPlaceholder())
import pycuda.driver
is_current = pycuda.driver.Context.get_current() == safe_gpu.gpu_owner.placeholders[0]
safe_gpu.release_gpus()
print(is_current)
""",
        ["True"],
    ),
    "a placeholder that fails": (
        """
def fail(device_no):
    raise RuntimeError("out of memory")
try:
    safe_gpu.claim_gpus(placeholder_fn=fail)
except RuntimeError as error:
    print("raised:", error)
print(safe_gpu.gpu_owner, os.environ.get("CUDA_VISIBLE_DEVICES"))
""",
        [
            *LOCKED,
            "Failed to acquire placeholder: out of memory",
            "lock released",
            "raised: out of memory",
            "None None",
        ],
    ),
    **{
        f"what fails when it has claimed: {options}": (
            f"""
import gpuaff
class Logger:
    def info(self, message):
        if message == "lock released":
            raise ValueError(message)
try:
    safe_gpu.claim_gpus({options})
except (TypeError, ValueError):
    print("raised")
print(safe_gpu.gpu_owner, gpuaff.current_claim(), os.environ.get("CUDA_VISIBLE_DEVICES"))
""",
            ["raised", "None None None"],
        )
        for options in ("debug_sleep=-1", "debug_sleep='x'", "logger=Logger()")
    },
}


@pytest.mark.parametrize(("script", "expected"), SAID.values(), ids=SAID)
def test_what_a_script_prints_and_logs(
    env: dict[str, str], script: str, expected: list[str]
) -> None:
    assert said(env, script)[-len(expected) :] == expected


def test_too_few_are_free(env: dict[str, str]) -> None:
    taken = "\nsafe_gpu.claim_gpus()\nprint('has it')\nsys.stdin.readline()\n"
    script = """
try:
    safe_gpu.claim_gpus(2)
except RuntimeError as error:
    print(type(error).__name__, error.wanted, error.free, "wait=" in str(error))
print(safe_gpu.gpu_owner, os.environ.get("CUDA_VISIBLE_DEVICES"))
safe_gpu.release_gpus()
print(safe_gpu.get_free_gpus())
"""
    with stopped(BEGIN + taken, env=env) as other:
        until(other, "has it")
        last = ["GpusBusyError 2 1 False", "None None", "['1']"]
        assert said(env, script) == [*LOCKED, "lock released", *last]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("claim_gpus('2')", "TypeError"),
        ("claim_gpus(1.0)", "TypeError"),
        ("claim_gpus(-1)", "InvalidOptionError: nb_gpus=-1"),
        ("claim_gpus(placeholder_fn='torhc')", "InvalidOptionError: placeholder_fn='torhc'"),
        ("claim_gpus(3)", "NotEnoughGpusError: requested 3 GPUs; this machine has 2 GPUs"),
    ],
)
def test_invalid_arguments(env: dict[str, str], call: str, error: str) -> None:
    done = run(f"{BEGIN}safe_gpu.{call}", env=env)
    assert error in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "placeholder",
    [
        "safe_gpu.PytorchPlaceholder()",
        "safe_gpu.pytorch_placeholder",
        "safe_gpu.TensorflowPlaceholder(logger=logging)",
        "safe_gpu.tensorflow_placeholder",
        "safe_gpu.PyCudaPlaceholder()",
        "'torch'",
    ],
)
def test_their_placeholders(env: dict[str, str], driver: FakeDriver, placeholder: str) -> None:
    script = f"""
safe_gpu.claim_gpus(2, placeholder_fn={placeholder})
print("taken")
sys.stdin.readline()
safe_gpu.release_gpus()
safe_gpu.release_gpus()
print("released", os.environ["CUDA_VISIBLE_DEVICES"])
sys.stdin.readline()
"""
    with stopped(BEGIN + script, env=env) as user:
        lines = until(user, "taken")
        assert lines.index("Set CUDA_VISIBLE_DEVICES=0,1") < lines.index("lock released")
        assert driver.contexts(0) == driver.contexts(1) == {user.pid}
        user.go_on()
        lines = until(user, "released 0,1")
        assert [line for line in lines if line.startswith("Releasing")] == [
            f"Releasing placeholder on CUDA device: {number}" for number in (0, 1)
        ]
        kept = set() if "PyCuda" in placeholder else {user.pid}
        assert driver.contexts(0) == kept


def until(user: Program, last: str) -> list[str]:
    """The lines of a script up to this one."""
    lines = []
    while (line := user.heard()) != last:
        lines.append(line)
    return lines


def test_a_screen_on_the_only_gpu(
    fake_driver: MakeDriver, env: dict[str, str], tmp_path: Path
) -> None:
    """safe_gpu takes no lock there, and does not look: who draws does not count."""
    alone = fake_driver(this_machine(1))
    alone.set_display(0, True)
    alone.use(0, 1, graphics=True, memory=700 << 20)
    script = """
print(safe_gpu.is_single_gpu_display_mode())
try:
    safe_gpu.claim_gpus(2)
except ValueError as error:
    print("refused:", error)
safe_gpu.claim_gpus()
print(safe_gpu.gpu_owner.devices_taken)
"""
    lines = said({**env, **alone.env()}, script)
    assert lines[0] == "True"
    assert "refused: requested 2 GPUs on a machine with a single one" in lines
    assert lines[-2:] == ["Set CUDA_VISIBLE_DEVICES=0", "[0]"]
    assert not any("lock" in line for line in lines)


def test_which_gpus_are_free(env: dict[str, str], driver: FakeDriver) -> None:
    ask = "print(safe_gpu.get_free_gpus())"
    assert said(env, ask) == ["['0', '1']"]
    driver.use(0, 1)
    assert said(env, ask) == ["['1']"]
    # This process's own are not free either.
    assert said(env, f"safe_gpu.claim_gpus()\n{ask}")[-1] == "[]"


def test_another_lock_file_of_the_site(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "theirs" / "lock"
    script = f"""
safe_gpu.LOCK_FILENAME = {str(path)!r}
def held(device_no):
    print("held:", os.path.exists({str(path)!r}), f":{{os.stat({str(path)!r}).st_ino}} " in
          open("/proc/locks").read())
safe_gpu.claim_gpus(placeholder_fn=held)
"""
    assert "held: True True" in said(env, script)


def test_ctrl_c_while_a_safe_gpu_user_chooses(env: dict[str, str]) -> None:
    from tests.safe_gpu_users import get, their_user

    script = """
try:
    safe_gpu.claim_gpus()
except KeyboardInterrupt:
    print("interrupted", safe_gpu.gpu_owner, os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
    with their_user(Path(env["GPUAFF_SAFE_GPU"])) as theirs:
        get(theirs)
        with stopped(BEGIN + script, env=env) as ours:
            assert ours.heard() == "acquiring lock"
            ours.kill(signal.SIGINT)
            assert until(ours, "interrupted None None") == []


def test_its_error_crosses_processes_and_means_no_shortage() -> None:
    error = pickle.loads(pickle.dumps(safe_gpu.NvidiasmiError("no driver")))
    kinds = [isinstance(error, kind) for kind in (GpuaffError, FileNotFoundError, RuntimeError)]
    assert (kinds, str(error)) == ([True, True, False], "no driver")


@pytest.mark.needs("safe_gpu")
def test_names_and_arguments_are_theirs() -> None:
    theirs = import_module("safe_gpu.safe_gpu")
    inner = {"SafeLock", "SafeUmask", "get_nvidia_smi_value"}
    named = {
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in {*inner, "Path"}
    }
    assert named <= set(safe_gpu.__all__)
    assert safe_gpu.LOCK_FILENAME == theirs.LOCK_FILENAME
    for name in "claim_gpus", "release_gpus", "GPUOwner", "get_free_gpus":
        old, new = (inspect.signature(getattr(which, name)) for which in (theirs, safe_gpu))
        assert list(new.parameters) == list(old.parameters)
        for parameter, was in old.parameters.items():
            if parameter != "placeholder_fn":  # a context, and not PyTorch
                assert new.parameters[parameter].default == was.default
