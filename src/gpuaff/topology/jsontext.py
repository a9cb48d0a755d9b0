"""JSON as we take it from files, and as we write it: strict in, compact and readable out."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_BYTES = 4 << 20
"""The longest text taken. A machine of 8192 CPUs needs less than a tenth of it."""

_WIDTH = 100


def loads(data: bytes | str) -> Any:
    """Read JSON (RFC 8259): UTF-8 with or without a BOM, no NaN, no key twice.

    Raises:
        ValueError: it is not that; the message is one line and says where.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES >> 20} MiB: not a topology")
    text = _decode(data)
    if not text.strip():
        raise ValueError("empty")
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_members)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {where}; was it cut?") from None
    except RecursionError:
        raise ValueError("not a topology: nested too deeply") from None


def _decode(data: bytes | str) -> str:
    if isinstance(data, str):
        return data.removeprefix("\N{BYTE ORDER MARK}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"not JSON: {constant} is not a JSON number")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} stands twice in one object")
    return members


def dumps(value: Any) -> str:
    """Write JSON with one line for whatever fits on it, in ASCII, with a newline at the end."""
    return _layout(value, "", 0) + "\n"


def _layout(value: Any, indent: str, lead: int) -> str:
    """A value's text.

    Args:
        value: what to write.
        indent: the blanks before the line that it stands on.
        lead: how much of that line is taken already (its key).
    """
    flat = json.dumps(value, allow_nan=False)
    if len(indent) + lead + len(flat) < _WIDTH or not isinstance(value, (dict, list)):
        return flat
    inner = f"{indent}  "
    if isinstance(value, dict):
        keys = [f"{json.dumps(key)}: " for key in value]
        parts = [
            key + _layout(member, inner, len(key))
            for key, member in zip(keys, value.values(), strict=True)
        ]
    elif any(isinstance(item, (dict, list)) for item in value):
        parts = [_layout(item, inner, 0) for item in value]
    else:
        parts = _filled([json.dumps(item) for item in value], _WIDTH - len(inner) - 1)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(parts)
    return f"{opening}\n{inner}{body}\n{indent}{closing}"


def _filled(items: list[str], room: int) -> list[str]:
    """Put as many items on a line as fit."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= room:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines
