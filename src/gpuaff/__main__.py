"""The process ``gpuaff``, also as ``python -m gpuaff``."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def program() -> NoReturn:
    """Run the command line, and exit."""
    try:
        from gpuaff.cli.interrupt import exit_on_interrupt

        exit_on_interrupt()
    except KeyboardInterrupt:
        os._exit(130)
    from gpuaff.cli import main

    try:
        sys.exit(main())
    finally:
        exit_on_interrupt()


if __name__ == "__main__":
    program()
