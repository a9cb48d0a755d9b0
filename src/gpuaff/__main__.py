"""The process ``gpuaff``, also as ``python -m gpuaff``."""

from __future__ import annotations

import os
import sys


def program() -> None:
    """Run the command line, and exit."""
    try:
        from gpuaff.cli import exit_on_interrupt, main

        exit_on_interrupt()
    except KeyboardInterrupt:
        os._exit(130)
    try:
        sys.exit(main())
    finally:
        exit_on_interrupt()


if __name__ == "__main__":
    program()
