"""``python -m gpuaff`` is the command ``gpuaff``."""

import sys

from gpuaff.cli import main

if __name__ == "__main__":
    sys.exit(main())
