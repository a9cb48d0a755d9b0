"""Plans, domains, warnings and refusals that are written down in ``tests/data/plans``."""

from __future__ import annotations

import pytest

from tests.allocator.written import FOLDER, Written, check, read


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(
            test,
            id=f"{file.stem}: {test.title}",
            marks=[pytest.mark.case(*test.cases)] if test.cases else [],
        )
        for file in sorted(FOLDER.glob("*.txt"))
        for test in read(file)
    ],
)
def test_what_is_written_down_is_planned(test: Written) -> None:
    assert test.questions
    for question in test.questions:
        check(question)
