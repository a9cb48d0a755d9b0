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
_LIBRARY = "libnvidia-ml.so.1"
_SOURCES = ("nvml.c", "state.c")


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


def build(folder: Path, *, without: frozenset[str] = frozenset()) -> Path:
    """Build the library, once for each set of missing functions.

    Args:
        folder: where the builds go.
        without: the functions that the library is not to have, as old drivers lack them.

    Returns:
        The folder that holds the ``libnvidia-ml.so.1``.

    Raises:
        RuntimeError: there is no compiler, or it says no.
    """
    name = sha256(" ".join(sorted(without)).encode()).hexdigest()[:12]
    target = folder / name
    if not (target / _LIBRARY).exists():
        target.mkdir(parents=True, exist_ok=True)
        _compile(target, without)
    return target


def _compile(target: Path, without: frozenset[str]) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("the fake driver needs Linux and a C compiler (gcc, cc or clang)")
    exports = target / "exports"
    hidden = "".join(f"{function}; " for function in sorted(without))
    exports.write_text(f"{{ global: nvml*; local: {hidden}*; }};\n")
    unfinished = target / f"{_LIBRARY}.{os.getpid()}"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", f"-Wl,-soname,{_LIBRARY}"]
    sources = [str(_HERE / source) for source in _SOURCES]
    command = [found, *options, f"-Wl,--version-script={exports}", "-o", str(unfinished), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the fake driver does not build: {' '.join(command)}\n{done.stderr}")
    unfinished.replace(target / _LIBRARY)
