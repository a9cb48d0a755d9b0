"""Places in JSON values that were read: to change one of them."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.seeds import KEYS, SCALARS, nested


def mangled(random: Random, value: Any, most: int = 4) -> Any:
    """A JSON value with 1 to ``most`` members changed, dropped, doubled or moved, in place."""
    for _ in range(random.randint(1, most)):
        holders = list(_holders(value))
        if holders:
            _change(random, random.choice(holders), holders)
    return value


def _holders(value: Any) -> list[Any]:
    """Every list and object that is not empty, the outermost first."""
    found, queue = [], [value]
    for one in queue:
        if isinstance(one, (dict, list)) and one:
            found.append(one)
            queue += one.values() if isinstance(one, dict) else one
    return found


def _change(random: Random, holder: Any, holders: list[Any]) -> None:
    place = (
        random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    )
    act = random.randrange(7)
    if act == 0:
        del holder[place]
    elif act == 1:
        other = random.choice(holders)
        donor = random.choice(list(other.values()) if isinstance(other, dict) else other)
        holder[place] = donor if not isinstance(donor, (dict, list)) else _copy(donor)
    elif act == 2:
        holder[place] = nested(random, 3)
    elif act == 3 and isinstance(holder, dict):
        holder[random.choice(KEYS)] = holder[place]
    elif act == 3:
        holder.insert(random.randrange(len(holder) + 1), _copy(holder[place]))
    elif isinstance(holder[place], bool) or not isinstance(holder[place], int):
        holder[place] = random.choice(SCALARS)
    else:
        holder[place] += random.choice((-1, 1, 7))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value
