"""What is fuzzed: how an input of each target is made, and what must hold of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gpuaff.allocator.domains import gpu_domains
from gpuaff.allocator.model import Partition, Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.errors import GpuaffError, TopologyError
from gpuaff.topology import serialize
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse
from tests.fuzz import machines
from tests.fuzz.mutate import NUMBERS, ODD, mangled, mutated
from tests.fuzz.seeds import Printer, nested, pastes, topologies
from tests.sound import sound


@dataclass(frozen=True)
class Target:
    """One thing that is fuzzed."""

    weight: int  # how many of a hundred inputs are its own, when all targets run
    make: Callable[[Random], Any]  # an input, the same for the same random numbers
    check: Callable[[Any], str]  # what came of it, the same in every process, or ``Refused``


class Refused(Exception):  # noqa: N818 - it is how things should be
    """The input was refused, in the way that is documented."""


def _refused(error: GpuaffError) -> Refused:
    """Check an error of ours: one line of text that can be printed, short whatever was read."""
    problem = str(error)
    assert len(problem.splitlines()) == 1
    assert len(problem) < 1200 or not isinstance(error, TopologyError)
    problem.encode("utf-8")
    return Refused(problem)


# --- pasted text ---------------------------------------------------------------------------


def make_pasted(random: Random) -> str:
    """Pasted text: real, printed by the rules of the commands, mutilated, or nonsense."""
    kind = random.random()
    if kind < 0.0005:
        rows = ["\t", "GPU0\tX\t", "node 0 cpus: 1\n", "0-65535,", "1,1,,1,\n"]
        return _huge(random, [*ODD, *NUMBERS, *rows])
    if kind < 0.05:
        letters = [chr(random.randrange(random.choice((256, 0x11000)))) for _ in range(100)]
        return "".join(random.choices([*letters, *ODD], k=random.randint(0, 200)))
    if kind < 0.15:
        words = " ".join(random.choices(pastes(), k=3)).split()
        return "".join(random.choice(words) + random.choice(" \t\n") for _ in range(60))
    text = Printer(random).text() if kind < 0.4 else random.choice(pastes())
    if kind > 0.9:
        text += random.choice(pastes())
    return mutated(random, text, pastes()) if random.random() < 0.9 else text


def _huge(random: Random, pieces: Sequence[str]) -> str:
    """Megabytes of the same, around the longest text that is taken."""
    piece = random.choice(pieces)
    return piece * (random.choice((10_000, 500_000, serialize.MAX_BYTES + 9)) // len(piece))


def check_pasted(text: str) -> str:
    """A sound topology that survives JSON and can be planned for, or one clear error."""
    try:
        found = parse(text)
    except TopologyError as error:
        raise _refused(error) from None
    sound(found)
    written = _comes_back(found)
    _plan_somehow(found)
    return written


def _comes_back(found: Topology) -> str:
    """A topology as JSON, which must give the topology and the same JSON again."""
    written = serialize.dumps(found)
    again = serialize.loads(written)
    assert again == found
    assert again.notes == found.notes
    return written


def _plan_somehow(found: Topology) -> None:
    """Any topology can be planned for: nobody gets what is not allowed."""
    ranks = max(1, len(found.visible))
    try:
        made = plan(found, ranks)
    except GpuaffError as error:
        _refused(error)
        return
    assert all(share.cpus <= found.allowed for share in made.shares)


# --- snapshots -----------------------------------------------------------------------------


def make_snapshot(random: Random) -> bytes | str:
    """JSON text: saved machines with changed members or characters, or nonsense."""
    kind = random.random()
    if kind < 0.0005:
        return _huge(random, ["[", '{"a":', "0,", " ", '"', "[[],", '{"cpus":"0-65535",', "\0"])
    if kind < 0.1:
        return json.dumps(nested(random, 5))
    if kind < 0.3:
        text = mutated(random, random.choice(topologies()), topologies(), 4)
        return text if random.random() < 0.5 else text.encode("utf-8", "surrogatepass")
    if kind < 0.6:
        value: Any = machines.machine(random).to_dict()
    else:
        value = json.loads(random.choice(topologies()))
    text = json.dumps(mangled(random, value, 3) if kind > 0.45 else value)
    return text if random.random() < 0.9 else text.encode(random.choice(("utf-8-sig", "utf-16")))


def check_snapshot(data: bytes | str) -> str:
    """A topology that comes back, or one clear error; also from the parsed JSON itself."""
    try:
        found = serialize.loads(data)
    except TopologyError as error:
        raise _refused(error) from None
    assert found.allowed <= found.cpus or not found.cpus
    assert set(found.visible) <= set(found.gpu_by_index)
    written = _comes_back(found)
    _plan_somehow(found)
    return written


# --- the planner ---------------------------------------------------------------------------


def make_plan(random: Random) -> tuple[Topology, dict[str, Any]]:
    """A machine, and what is asked about it."""
    found = machines.machine(random)
    asked = machines.question(random, found)
    if isinstance(asked["nproc"], int) and 0 < asked["nproc"] < 100:
        asked.update(machines.exact(random, found, asked["nproc"]))
    return found, asked


def check_plan(given: tuple[Topology, dict[str, Any]]) -> str:
    """Shares inside what is allowed; own ones apart; none of another order's; or an error."""
    found, asked = given
    try:
        made = plan(found, **asked)
    except GpuaffError as error:
        raise _refused(error) from None
    assert [share.rank for share in made.shares] == list(range(int(asked["nproc"])))
    _check_inside(found, asked, made)
    if made.partition is Partition.MACHINE:
        cut = gpu_domains(found)
        assert all(share.cpus | share.reserved <= cut[share.gpu or 0] for share in made.shares)
    if asked["mode"] in machines.UNIQUE:
        _check_apart(made)
    cores = None if found.cores is None else found.cores[::-1]
    assert plan(found._replace(cores=cores, gpus=found.gpus[::-1]), **asked) == made
    return json.dumps(made.to_dict())


def _check_inside(found: Topology, asked: dict[str, Any], made: Plan) -> None:
    """Nobody gets what is not allowed, to all or to the rank, nor what is reserved."""
    masks = asked.get("rank_allowed") or [found.allowed] * len(made.shares)
    reserved = machines.union(share.reserved for share in made.shares)
    for share, mask in zip(made.shares, map(_cpus, masks), strict=True):
        usable = mask & found.cpus if found.cpus else mask
        usable &= _cpus(asked.get("cpus") or usable)
        assert share.cpus or not usable
        assert share.cpus <= usable
        assert share.reserved <= usable
        assert share.cpus.isdisjoint(reserved)


def _cpus(given: str | Iterable[int]) -> CpuSet:
    return parse_cpulist(given) if isinstance(given, str) else frozenset(given)


def _check_apart(made: Plan) -> None:
    """The unique modes: no CPU in two shares, or it is said; balanced shares are equal."""
    if any(note.code in ("too-few-cores", "no-gpu", "cpus-unknown") for note in made.warnings):
        return
    given_out = [cpu for share in made.shares for cpu in share.cpus | share.reserved]
    assert len(given_out) == len(set(given_out))
    if made.balanced:
        assert len({share.cores for share in made.shares}) == 1


# --- borders -------------------------------------------------------------------------------


def check_borders(found: Topology) -> str:
    """Every online CPU in at most one border, and the cores whole."""
    cut = dict(gpu_domains(found))
    given_out = [cpu for border in cut.values() for cpu in border]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= found.cpus
    assert set(cut) <= set(found.gpu_by_index)
    for core in found.cores or ():
        assert all(core <= border or core.isdisjoint(border) for border in cut.values())
    mine = found._replace(allowed=frozenset(sorted(found.allowed)[:1]), visible=found.visible[:1])
    assert gpu_domains(mine) == cut
    return repr({index: format_cpulist(border) for index, border in cut.items()})


TARGETS = {
    "pasted": Target(30, make_pasted, check_pasted),
    "snapshot": Target(20, make_snapshot, check_snapshot),
    "plan": Target(25, make_plan, check_plan),
    "borders": Target(10, machines.machine, check_borders),
}
"""All targets by name."""
