"""The command line, one file a command."""

from __future__ import annotations

TYPE_CHECKING = False  # what is imported here, `gpuaff run` has to wait for
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gpuaff`` with these arguments.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit code: 0, 1 for a failure, 2 for a wrong use, 130 after Ctrl-C and 141 when
        the reader of the output has gone.
    """
    try:
        from gpuaff.cli.dispatch import dispatch

        return dispatch(argv)
    except KeyboardInterrupt:
        return 130  # as a shell reports a process that SIGINT ended
