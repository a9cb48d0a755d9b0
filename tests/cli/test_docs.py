"""What the README and the docs show is what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff.cli import main

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "tests/data/machines/h100x2-vm.json"

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs a checkout")


def shown(page: str, command: str) -> str:
    """What a page shows below a command, up to the next one or the end of the block."""
    text = (ROOT / page).read_text("utf-8").split(f"$ {command}\n")[1]
    return text.split("```")[0].split("\n$ ")[0].strip("\n")


def test_the_plan_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --from dgx-a100 --nproc 8"
    assert main(command.split()) == 0
    assert capsys.readouterr().out.strip("\n") == shown("README.md", f"gpuaff {command}")


@pytest.mark.parametrize("command", ["topo", "plan --nproc 2"])
def test_the_real_machine(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--from", str(SAVED)]) == 0
    printed = capsys.readouterr().out.replace(str(SAVED), "this machine")
    assert printed.strip("\n") == shown("docs/real-machine.md", f"gpuaff {command}")
