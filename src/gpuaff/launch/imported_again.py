"""Whether this process only imports again the script of the one that has made it.

A child of multiprocessing that is spawned, or that a fork server makes (Python's default on Linux
since 3.14), does that first, and so calls again what the script calls at its top: for the child,
all that was done there stands already.
"""

from __future__ import annotations

import sys


def is_imported_again() -> bool:
    """Whether it does so just now: what the child is for has not begun.

    It is what multiprocessing itself looks at, to refuse processes that are started there. A fork
    server that imports the script for its children is in the same state. Nothing is imported for
    it: such a child has the module.
    """
    process = sys.modules.get("multiprocessing.process")
    return process is not None and hasattr(process.current_process(), "_inheriting")
