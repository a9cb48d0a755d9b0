"""``python -m gpuaff`` is the command ``gpuaff``."""

from gpuaff.cli import program

if __name__ == "__main__":
    program()
