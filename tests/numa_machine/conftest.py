"""The emulated machine is started once; each test looks at what one scenario found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numa_machine.machine import play
from tests.numa_machine.seen import Found


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario, from one start of the machine."""
    return play(tmp_path_factory.mktemp("numa-machine"))


@pytest.fixture
def found(played: dict[str, Any]) -> Found:
    """What a scenario found."""

    def of(scenario: str) -> Any:
        line = played[scenario]
        if "raised" in line:
            pytest.fail(line["raised"], pytrace=False)
        return line["found"]

    return of
