"""Find a program and become it, as ``env`` does by the rules of execvp(3).

A name with a slash is a path; one without is searched in each folder of PATH; a file that is no
program the kernel knows is a script of ``/bin/sh``.
"""

from __future__ import annotations

import errno
import os
import signal
import stat

from gpuaff._system import env, kernel
from gpuaff.errors import CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_DEFAULT_PATH = "/bin:/usr/bin"  # where glibc searches when PATH is not set
_SHELL = "/bin/sh"

# Python ignores these as it starts, and what is ignored stays so over exec.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_COERCED_LOCALES = ("C.UTF-8", "C.utf8", "UTF-8")  # what Python makes of LC_CTYPE=C (PEP 538)


def find(command: str) -> str:
    """The file that a command means; CommandError: there is none that this user may execute."""
    is_path, candidates = "/" in command, [command]
    if command and not is_path:
        path = env.get("PATH")
        folders = (_DEFAULT_PATH if path is None else path).split(":")
        candidates = [f"{folder or '.'}/{command}" for folder in folders]
    obstacle = ""  # the first
    for path in candidates:
        try:
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
            if not is_folder and os.access(path, os.X_OK):
                return path
            found = "is a folder" if is_folder else "may not be executed (chmod +x)"
        except PermissionError:
            found = "is in a folder that may not be searched"
        except (OSError, ValueError) as error:  # ValueError: there is a NUL in it
            code = getattr(error, "errno", errno.ENOENT)
            if code == errno.ENOENT or (code == errno.ENOTDIR and not is_path):
                continue
            found = f"cannot be run: {os.strerror(code)}"
        obstacle = obstacle or (found if is_path else f"{path} {found}")
    if obstacle:
        raise CommandError(command, True, obstacle)
    raise CommandError(command, False, "no such file" if is_path else "command not found in PATH")


def become(path: str, words: Sequence[str], *, keeping: Sequence[int] = ()) -> NoReturn:
    """Replace this process's program: its files, signals and environment stay.

    What Python has changed for itself is put back first. ``words`` are the program's name as it
    was called, and its arguments; it inherits the descriptors in ``keeping``, too. CommandError:
    the kernel refuses.
    """
    _restore_signals()
    if env.get("LC_CTYPE") in _COERCED_LOCALES:
        before = kernel.variables_of(os.getpid())
        env.put("LC_CTYPE", before.get("LC_CTYPE") if before else env.get("LC_CTYPE"))
    for handle in keeping:
        os.set_inheritable(handle, True)
    try:
        _exec(path, list(words))
    except (OSError, ValueError) as error:  # ValueError: there is a NUL in a word
        why = f"cannot be run: {getattr(error, 'strerror', None) or error}"
        code = getattr(error, "errno", None)
        if code == errno.ENOENT and os.path.exists(path):
            why = f"the interpreter that {path} names is not there"
        raise CommandError(words[0], code != errno.ENOENT, why) from error


def _exec(path: str, words: list[str]) -> NoReturn:
    try:
        os.execv(path, words)  # noqa: S606 - no shell is wanted
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        os.execv(_SHELL, [_SHELL, path, *words[1:]])  # noqa: S606 - as execvp(3) does


def _restore_signals() -> None:
    """Undo what Python did to signals."""
    # A parent may have ignored them too, which is unknown by now: subprocess does the same. SIGINT
    # stays ignored where the parent ignores it (a job in the background).
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on Ctrl-C ends the process
    for number in _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
