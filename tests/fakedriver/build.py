"""Builds the fake driver with the machine's own C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

_HERE = Path(__file__).parent
_LIBRARIES = {"libnvidia-ml.so.1": ("nvml", "nvml.c"), "libcuda.so.1": ("cu", "cuda.c")}
"""Each library: how its functions begin, and its source."""


@cache
def compiler() -> str | None:
    """A C compiler that can build a shared library here; None when there is none."""
    if not sys.platform.startswith("linux"):
        return None
    for name in (os.environ.get("CC", ""), "gcc", "cc", "clang"):
        found = shutil.which(name) if name else None
        if found and _works(found):
            return found
    return None


def _works(found: str) -> bool:
    """Whether it builds: a compiler without the C library's headers does not."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text('#include <stdio.h>\nint probe(void) { return puts(""); }\n')
        command = [found, "-shared", "-fPIC", "-o", f"{folder}/probe.so", str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build(folder: Path, *, without: frozenset[str] = frozenset(), smi: bool = False) -> Path:
    """Build the libraries ``without`` some functions, as old drivers lack them; gives their folder.

    With ``smi``, ``nvidia-smi`` is in its folder ``bin``. RuntimeError: there is no compiler, or it
    says no.
    """
    name = sha256(" ".join(sorted(without)).encode()).hexdigest()[:12]
    target = folder / name
    for library, (prefix, source) in _LIBRARIES.items():
        if not (target / library).exists():
            _link_library(folder, target / library, prefix, source, without)
    program = target / "bin" / "nvidia-smi"
    if smi and not program.exists():
        program.parent.mkdir(exist_ok=True)
        text = _HERE.joinpath("smi.py").read_text()
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
    return target


def _link_library(
    folder: Path, target: Path, prefix: str, source: str, without: frozenset[str]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    exports = target.with_name(f"{target.name}.exports.{os.getpid()}")
    hidden = "".join(f"{name}; " for name in sorted(without) if name.startswith(prefix))
    exports.write_text(f"{{ global: {prefix}*; local: {hidden}*; }};\n")
    options = ["-shared", "-fPIC", f"-Wl,-soname,{target.name}", f"-Wl,--version-script={exports}"]
    _make(target, [*options, *(str(_object(folder, one)) for one in (source, "state.c"))])
    exports.unlink()


def _object(folder: Path, source: str) -> Path:
    """A source, compiled once for all sets of functions: only linking differs."""
    target = folder / f"{source}.o"
    if not target.exists():
        _make(target, ["-c", "-fPIC", "-O1", "-Wall", "-Wextra", str(_HERE / source)])
    return target


def _make(target: Path, arguments: list[str]) -> None:
    """Under another name first: who builds the same beside us disturbs nobody."""
    found = compiler()
    if found is None:
        raise RuntimeError("the fake driver needs Linux and a C compiler (gcc, cc or clang)")
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = [found, *arguments, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the fake driver does not build: {' '.join(command)}\n{done.stderr}")
    unfinished.replace(target)
