"""The lines of a recording: one JSON object per call, as ``docs/replay.md`` describes them.

Field names mean the same in every line, so one table says how each is written and read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from kvloom.config import MOST_BYTES
from kvloom.manager import events
from kvloom.manager.manager import MOST_NODES, MOST_SEQUENCES
from kvloom.replay.lines import Fail, check_names, shown
from kvloom.spec.plain import spec_from_plain, spec_to_plain
from kvloom.types import Grade, Int32Array, Kind, Reason

VERSION = 1
MARK = "kvloom_recording"
"""The first field of the first line: the version of the format."""
MOST_TICKS = 1 << 20
_MOST = 1 << 62
_HEX = re.compile(r"([0-9a-f]{2})*", re.ASCII)
_FIRST = re.compile(rf'\s*\{{\s*"{MARK}"')


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a run that was not interrupted: the manager's counters."""

    kinds: Mapping[str, Mapping[str, int]]
    used: int
    nodes: int
    plans_open: int
    completions_ignored: int


Entry = events.Event | End
_OPS: dict[str, type[Entry]] = {
    "open": events.Open,
    "append": events.Append,
    "commit": events.Commit,
    "rollback": events.Rollback,
    "checkpoint": events.Checkpoint,
    "fork": events.Fork,
    "close": events.Close,
    "batch": events.MakeBatch,
    "step": events.Step,
    "finish": events.Finish,
    "complete": events.Complete,
    "abandon": events.Abandon,
    "evict": events.Evict,
    "clear": events.Clear,
    "drop": events.Drop,
    "tick": events.Tick,
    "end": End,
}
_NAMES = {cls: name for name, cls in _OPS.items()}


# ---------------------------------------------------------------- writing


def to_line(entry: Entry, version: str) -> str:
    """``entry`` as one line of JSON without its line end; ``version`` is kvloom's own, for the first line."""
    if isinstance(entry, events.Made):
        first = {
            MARK: VERSION,
            "kvloom": version,
            "policy": entry.policy,
            "device": entry.device,
            "max_sequences": entry.max_sequences,
            "max_nodes": entry.max_nodes,
            "model": spec_to_plain(entry.spec),
        }
        return json.dumps(first, separators=(",", ":"))
    line: dict[str, Any] = {"op": _NAMES[type(entry)]}
    for each in fields(entry):
        value = getattr(entry, each.name)
        if each.default is MISSING or value != each.default:
            line[each.name] = _FIELDS[each.name].write(value)
    return json.dumps(line, separators=(",", ":"))


# ---------------------------------------------------------------- reading


def is_first_line(text: str) -> bool:
    """Whether ``text`` begins a recording, whole or not."""
    return _FIRST.match(text) is not None


def made_from(row: dict[str, Any], fail: Fail) -> events.Made:
    """The first line."""
    if row.get(MARK) != VERSION or isinstance(row[MARK], bool):
        fail(
            f"the recording has version {shown(row.get(MARK))}, and this kvloom reads {VERSION}; record the run again, "
            "or use the kvloom that made it"
        )
    known = (MARK, "kvloom", "policy", "device", "max_sequences", "max_nodes", "model")
    check_names(row, known, known, "the first line", fail)
    most = {"device": MOST_BYTES, "max_sequences": MOST_SEQUENCES, "max_nodes": MOST_NODES}
    numbers = [_number(row[name], name, fail, least=1, most=most[name]) for name in most]
    for name in ("kvloom", "policy"):
        _text(row[name], name, fail)
    return events.Made(spec_from_plain(row["model"]), row["policy"], *numbers)


def entry_from(row: dict[str, Any], fail: Fail) -> Entry:
    """Any line but the first."""
    op = row.get("op")
    cls = _OPS.get(op) if isinstance(op, str) else None
    if cls is None:
        fail(f"op is {shown(op)}; it must be one of {', '.join(_OPS)}")
    known = fields(cls)
    needed = [f.name for f in known if f.default is MISSING]
    check_names(row, ("op", *(f.name for f in known)), needed, str(op), fail)
    return cls(**{f.name: _FIELDS[f.name].read(row[f.name], f.name, fail) for f in known if f.name in row})


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is written, and read again with its name for messages."""

    read: Callable[[Any, str, Fail], Any]
    write: Callable[[Any], Any] = field(default=lambda value: value)


def _number(value: object, name: str, fail: Fail, *, least: int = 0, most: int = _MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        fail(f"{name} is {shown(value)}; it must be a whole number")
    if not least <= value <= most:
        fail(f"{name} is {shown(value)}; it must be in {least} to {most}")
    return value


def _ticks(value: object, name: str, fail: Fail) -> int:
    return _number(value, name, fail, least=1, most=MOST_TICKS)


def _position(value: object, name: str, fail: Fail) -> int | None:
    return None if value is None else _number(value, name, fail, most=(1 << 63) - 1)


def _text(value: object, name: str, fail: Fail) -> str:
    if not isinstance(value, str):
        fail(f"{name} is {shown(value)}; it must be a string")
    return value


def _flag(value: object, name: str, fail: Fail) -> bool:
    if not isinstance(value, bool):
        fail(f"{name} is {shown(value)}; it must be true or false")
    return value


def _ids(value: object, name: str, fail: Fail) -> Int32Array:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 1 << 31 for v in value):
        fail(f"{name} is {shown(value)}; it must be a list of token ids, whole numbers from 0 to 2**31 - 1")
    return np.array(value, dtype=np.int32)


def _numbers(value: object, name: str, fail: Fail) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v < _MOST for v in value):
        fail(f"{name} is {shown(value)}; it must be a list of whole numbers from 0")
    return tuple(value)


def _hex(value: object, name: str, fail: Fail) -> bytes:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        fail(f"{name} is {shown(value)}; it must be a digest in hexadecimal digits")
    return bytes.fromhex(value)


def _salt(value: object, name: str, fail: Fail) -> bytes | None:
    return None if value is None else _hex(value, name, fail)


def _keys(value: object, name: str, fail: Fail) -> tuple[tuple[str, bytes], ...]:
    if not isinstance(value, list) or not all(isinstance(p, list) and len(p) == 2 for p in value):
        fail(f"{name} is {shown(value)}; it must be a list of [name, digest] pairs")
    return tuple((_text(key, name, fail), _hex(digest, name, fail)) for key, digest in value)


def _word(words: Mapping[str, Any]) -> Callable[[Any, str, Fail], Any]:
    def read(value: object, name: str, fail: Fail) -> Any:
        if not isinstance(value, str) or value not in words:
            fail(f"{name} is {shown(value)}; it must be one of {', '.join(words)}")
        return words[value]

    return read


def _counters(value: object, name: str, fail: Fail) -> dict[str, dict[str, int]]:
    if not isinstance(value, dict) or not all(isinstance(of_kind, dict) for of_kind in value.values()):
        fail(f"{name} is {shown(value)}; it must be an object of the counters of every kind")
    return {
        kind: {counter: _number(n, f"{name}.{kind}.{counter}", fail) for counter, n in of_kind.items()}
        for kind, of_kind in value.items()
    }


def _lower(value: Any) -> str:
    return str(value.name).lower()


_KEYED = _Field(_keys, lambda keys: [[name, value.hex()] for name, value in keys])
_GRADES = _Field(_word({grade.name.lower(): grade for grade in Grade}), _lower)
_COUNT = _Field(_number)
_TOKENS = _Field(_ids, lambda ids: ids.tolist())
_SALTED = _Field(_salt, lambda salt: None if salt is None else salt.hex())
_FIELDS: Mapping[str, _Field] = {
    **dict.fromkeys(("seq", "child", "batch", "plan", "priority", "reused", "bytes", "freed", "dropped"), _COUNT),
    **dict.fromkeys(("used", "nodes", "plans_open", "completions_ignored"), _COUNT),
    **dict.fromkeys(("seqs", "plans"), _Field(_numbers, list)),
    **dict.fromkeys(("group", "refused"), _Field(_text)),
    **dict.fromkeys(("floor", "grade"), _GRADES),
    "tokens": _TOKENS,
    "salt": _SALTED,
    "keys": _KEYED,
    "reason": _Field(_word({reason.value: reason for reason in Reason}), lambda reason: reason.value),
    "kind": _Field(_word({kind.name.lower(): kind for kind in Kind}), _lower),
    "position": _Field(_position),
    "quarantine": _Field(_flag),
    "by": _Field(_ticks),
    "kinds": _Field(_counters),
}
