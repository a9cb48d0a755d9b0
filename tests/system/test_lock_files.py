"""The descriptors of what is locked: out of the way, and inherited by whom they should be."""

from __future__ import annotations

import os
from pathlib import Path

from gpuaff._system import locks
from tests.processes import printed, stopped


def test_descriptors_are_out_of_the_way_of_scripts(tmp_path: Path) -> None:
    handle = locks.open_directory(str(tmp_path))
    assert handle >= 200
    assert not os.get_inheritable(handle)
    os.close(handle)


def test_a_low_limit_of_open_files_is_no_failure(tmp_path: Path) -> None:
    script = f"""
import os, resource
from gpuaff._system import locks
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
handle = locks.open_directory({str(tmp_path)!r})
print(handle < 64, locks.try_flock(handle), os.get_inheritable(handle))
"""
    assert printed(script) == "True True False"


def test_the_program_that_a_process_becomes_keeps_what_it_may_inherit(tmp_path: Path) -> None:
    script = f"""
import os, sys
from gpuaff._system import locks
handle = locks.open_directory({str(tmp_path)!r})
assert locks.try_flock(handle)
if sys.stdin.readline().strip() == "keep":
    os.set_inheritable(handle, True)
os.execvp("sh", ["sh", "-c", "echo there; read line"])
"""
    mine = locks.open_directory(str(tmp_path))
    for word in "keep", "drop":
        with stopped(script) as process:
            process.go_on(word)
            assert process.heard() == "there"
            assert locks.try_flock(mine) == (word == "drop")
            locks.unlock(mine)
    os.close(mine)
