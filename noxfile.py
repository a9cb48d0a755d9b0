"""What is checked, by name: `nox -l` lists the sessions, `nox -s lint` runs one.

Each session makes an environment of its own; `nox --no-venv -s lint` runs it in the present one,
as `.ci/run` does.
"""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "types", "tests", "docs"]

ELSEWHERE = ("--ignore=tests/numa_machine", "--ignore=tests/schedulers")
"""Tests that need root, and programs that they start as services: see docs/testing.md."""


def install(session: nox.Session, *groups: str, package: bool = True) -> None:
    """Install gpuaff with its command line, and these dependency groups."""
    if session.virtualenv.is_sandboxed:
        session.install("pip>=25.1")  # dependency groups need it
        wanted = ["-e", ".[cli]"] if package else []
        session.install(*wanted, *(f"--group={group}" for group in groups))


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests; arguments go to pytest: nox -s tests -- tests/topology."""
    install(session, "tests")
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The slow tests, but for those of the next two sessions."""
    install(session, "tests", "integration", "examples")
    options = ("-n", "auto", "--slow", "-m", "slow", *ELSEWHERE)
    session.run("python", "-m", "pytest", *options, *session.posargs)


@nox.session
def schedulers(session: nox.Session) -> None:
    """Under real Slurm, Grid Engine, mpiruns and torchrun; as root."""
    install(session, "tests", "integration", "examples")
    session.run("python", "-m", "pytest", "--slow", "tests/schedulers", *session.posargs)


@nox.session
def numa(session: nox.Session) -> None:
    """On the emulated machine with two sockets; as root."""
    install(session, "tests", "integration")
    session.run("python", "-m", "pytest", "--slow", "tests/numa_machine", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, spelling and layers."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Types, strictly."""
    install(session, "tests", "typing", "integration")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The pages, with warnings as errors, and their examples."""
    install(session, "docs")
    for builder in ("html", "doctest"):
        folder = f"docs/_build/{builder}"
        session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", builder, "docs", folder)


@nox.session
def mutation(session: nox.Session) -> None:
    """Would the tests notice if the code were wrong? Takes an hour."""
    session.run("bash", "scripts/mutation.sh", *session.posargs, external=True)
