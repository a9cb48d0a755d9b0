"""The JSON Schema that ships: what gpuaff saves is valid by it, and what is not is refused."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from gpuaff import Topology
from gpuaff.errors import TopologyError
from gpuaff.topology.serialize import machine_names
from tests.strategies import topologies

ROOT = Path(__file__).parents[2]
SAVED = sorted(
    path
    for folder in ("machines", "topologies", "described", "threads")
    for path in (ROOT / "tests/data" / folder).glob("*.json")
)

SCHEMA = json.loads((resources.files("gpuaff.topology") / "topology.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)

SHORTEST: dict[str, Any] = {"schema_version": 1, "cpus": "0-3", "gpus": []}


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", machine_names())
def test_machines_that_ship_are_valid(name: str) -> None:
    file = resources.files("gpuaff.topology") / "machines" / f"{name}.json"
    VALIDATOR.validate(json.loads(file.read_text()))


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_saved_machines_are_valid(path: Path) -> None:
    VALIDATOR.validate(json.loads(path.read_text("utf-8")))


@settings(deadline=None)
@given(topologies())
def test_whatever_is_saved_is_valid(topology: Topology) -> None:
    VALIDATOR.validate(topology.to_dict())


def test_the_schema_lists_every_member() -> None:
    assert list(SCHEMA["properties"]) == list(Topology().to_dict())


@pytest.mark.parametrize(
    "changed",
    json.loads((ROOT / "tests/data/json/invalid.json").read_text("utf-8")),
    ids=json.dumps,
)
def test_what_is_not_valid_is_refused_by_both(changed: dict[str, Any]) -> None:
    data = SHORTEST | changed
    assert VALIDATOR.is_valid(SHORTEST)
    assert not VALIDATOR.is_valid(data)
    with pytest.raises(TopologyError):
        Topology.from_dict(data)
