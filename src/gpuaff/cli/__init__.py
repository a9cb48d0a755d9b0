"""The command line, one module a command."""

from __future__ import annotations

TYPE_CHECKING = False  # `gpuaff run` delays the user's program by whatever is imported here
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gpuaff`` with these arguments.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit code, as docs/cli.md lists them; 130 after Ctrl-C. ``run`` returns only where its
        command was not started.
    """
    try:
        from gpuaff.cli.dispatch import dispatch

        return dispatch(argv)
    except KeyboardInterrupt:
        return 130  # as a shell reports a process that SIGINT ended
