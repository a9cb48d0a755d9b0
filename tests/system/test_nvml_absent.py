"""Where NVML cannot be used at all: one clear line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff.errors import NoDriverError
from tests.fakedriver.driver import MakeDriver, run
from tests.fakedriver.state import NVML
from tests.nvml_reading import FULL, PROGRAM, answer_of, read

REFUSALS = {
    NVML.LIB_RM_VERSION_MISMATCH: ("version mismatch", "reboot"),
    NVML.DRIVER_NOT_LOADED: ("is not loaded", "modprobe nvidia"),
    NVML.NO_PERMISSION: ("may not talk", "/dev/nvidia"),
    NVML.GPU_IS_LOST: ("off the bus", "dmesg"),
    NVML.FUNCTION_NOT_FOUND: ("too old", "update"),
    NVML.UNKNOWN: ("Unknown Error", "nvidia-smi"),
}


def is_one_line(error: NoDriverError) -> bool:
    return "\n" not in str(error) and str(error) == f"{error.reason}; {error.remedy}"


@pytest.mark.fake_driver
class TestNoDriver:
    @pytest.mark.case("F5", "A4")
    @pytest.mark.parametrize("code", REFUSALS)
    def test_nvml_does_not_start(self, fake_driver: MakeDriver, code: NVML) -> None:
        driver = fake_driver(FULL)
        driver.refuse(code)
        with pytest.raises(NoDriverError) as caught:
            read(driver)
        reason, remedy = REFUSALS[code]
        assert reason in caught.value.reason
        assert remedy in caught.value.remedy
        assert is_one_line(caught.value)
        assert (driver.inits, driver.shutdowns) == (0, 0)

    @pytest.mark.case("F3", "A4")
    def test_the_stub(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.state.stub = 1
        with pytest.raises(NoDriverError) as caught:
            read(driver)
        assert "stub" in caught.value.reason
        assert "LD_LIBRARY_PATH" in caught.value.remedy
        assert is_one_line(caught.value)

    def test_gpus_cannot_be_counted(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.fail("nvmlDeviceGetCount_v2", NVML.UNKNOWN)
        with pytest.raises(NoDriverError, match="Unknown Error"):
            read(driver)
        assert (driver.inits, driver.shutdowns) == (1, 1)


OLD_PACKAGE = """
class NVMLError(Exception): pass
nvmlInit = nvmlShutdown = nvmlDeviceGetCount = nvmlDeviceGetHandleByIndex = None
"""


def error_with(folder: Path, files: dict[str, str], before: str = "") -> NoDriverError:
    """The error of a process that finds these modules first, and a driver that is none."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "libnvidia-ml.so.1").write_text("this is no library")
    program = PROGRAM.format(links=False, before=before, after="")
    env = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
    with pytest.raises(NoDriverError) as caught:
        answer_of(run(program, env=env).stdout)
    assert is_one_line(caught.value)
    return caught.value


class TestNoModule:
    """No compiler is needed here: it does not come so far."""

    def test_not_installed(self, tmp_path: Path) -> None:
        error = error_with(tmp_path, {}, before="sys.modules['pynvml'] = None")
        assert error.reason == "the Python module pynvml is not installed"
        assert error.remedy == "pip install nvidia-ml-py"

    @pytest.mark.parametrize(
        "files",
        [
            {"pynvml/__init__.py": OLD_PACKAGE},
            {"pynvml.py": "def nvmlInit(): ..."},
            {"pynvml.py": "print 'for Python 2'"},
            {"pynvml.py": "import nvml_of_old"},
            {"pynvml.py": "raise OSError('no libnvidia-ml.so.1,\\nso what')"},
        ],
        ids=["old-package", "lacks-functions", "python-2", "incomplete", "fails-on-import"],
    )
    def test_the_wrong_one(self, tmp_path: Path, files: dict[str, str]) -> None:
        error = error_with(tmp_path, files)
        assert error.reason.startswith("the Python module pynvml ")
        if "is not nvidia-ml-py's" in error.reason:
            assert str(tmp_path / "pynvml") in error.reason
        assert "pip uninstall -y pynvml" in error.remedy
        assert "pip install --force-reinstall nvidia-ml-py" in error.remedy

    @pytest.mark.case("F3", "A4")
    def test_no_library(self, tmp_path: Path) -> None:
        error = error_with(tmp_path, {})
        assert "libnvidia-ml.so.1" in error.reason
        assert "Jetson" in error.remedy

    def test_the_shell_that_warns(self, tmp_path: Path) -> None:
        """The last releases of the distribution pynvml warn from a finder: it is not heard."""
        before = """
import warnings
class Shell:
    def find_spec(self, name, path=None, target=None):
        if name == "pynvml":
            warnings.warn("The pynvml package is deprecated.", FutureWarning)
sys.meta_path.insert(0, Shell())
warnings.simplefilter("error")
"""
        assert "libnvidia-ml.so.1" in error_with(tmp_path, {}, before=before).reason
