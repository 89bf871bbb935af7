"""Reading trace files.  A bad file raises InputError with the file, the line and what to do about it.

Forms: Mooncake (JSON lines with ``hash_ids``), agentic (JSON lines with ``session_id``, ``block_size`` and
``hash_runs``, which is [first id, count, first id, count, ...]), Azure (CSV with lengths only: every prompt is unique).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvloom.engine.files import refuse_device
from kvloom.errors import InputError
from kvloom.replay.trace import NO_SESSION, Trace, make_trace
from kvloom.types import IntArray

MOONCAKE_BLOCK = 512
LENGTHS_BLOCK = 128
"""Tokens per block where a trace has lengths only."""
MOST_TOKENS = 1 << 27
"""A longer prompt or answer is taken for a mistake."""
MOST_REFERENCES = 1 << 30
_MOST_LINE = 64 << 20

_COMMON = ("timestamp", "input_length", "output_length")
_FIELDS = {
    "mooncake": (*_COMMON, "hash_ids"),
    "agentic": (*_COMMON, "session_id", "block_size", "hash_runs"),
}
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
Fail = Callable[[str], NoReturn]


def read_trace(path: Path, *, block: int | None = None) -> Trace:
    """Read a trace file of any known form; ``block`` is the block of a form that has lengths only.

    Raises InputError: unreadable, empty, of no known form, or bad at a line that is named.
    """
    rows = _Rows(path)
    lines = _lines(path)
    first = next(((at, text) for at, text in lines if text.strip()), None)
    if first is None:
        raise InputError(f"{path}: the file is empty; a trace has one request per line")
    if first[1].lstrip().startswith("{"):
        _read_json(rows, first, lines)
    elif "ContextTokens" in first[1]:
        _read_csv(rows, first, lines, block or LENGTHS_BLOCK)
    else:
        raise InputError(
            f"{path}, line {first[0]}: neither a JSON object nor the header {','.join(_AZURE)}; a trace is JSON lines "
            "with hash_ids or hash_runs, or such a CSV file"
        )
    if not rows.inputs:
        raise InputError(f"{path}: there is no request after the header; a trace has one request per line")
    return rows.trace()


class _Rows:
    """The columns of a file as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.form = ""
        self.block = 0
        self.lines: list[int] = []
        self.arrivals: list[float] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.sessions: list[int] = []
        self.counts: list[int] = []  # blocks per request
        self.firsts: list[int] = []  # runs of consecutive ids: first id ...
        self.spans: list[int] = []  # ... and how many
        self.references = 0

    def fail_at(self, line: int) -> Fail:
        def fail(what: str) -> NoReturn:
            raise InputError(f"{self.path}, line {line}: {what}")

        return fail

    def trace(self) -> Trace:
        firsts, spans = _int64(self.firsts), _int64(self.spans)
        begins = np.cumsum(spans) - spans
        ids = np.repeat(firsts - begins, spans) + np.arange(int(spans.sum()), dtype=np.int64)
        return make_trace(
            name=self.path.name,
            form=self.form,
            block=self.block,
            arrivals=np.array(self.arrivals, dtype=np.float64),
            inputs=_int64(self.inputs),
            outputs=_int64(self.outputs),
            sessions=_int64(self.sessions),
            counts=_int64(self.counts),
            ids=ids,
            lines=_int64(self.lines),
        )


def _int64(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        refuse_device(path.stat(), str(path))
        with path.open(encoding="utf-8-sig") as file:
            at = 0
            while line := file.readline(_MOST_LINE + 1):
                at += 1
                if len(line) > _MOST_LINE:
                    raise InputError(f"{path}, line {at}: longer than {_MOST_LINE} characters; a line is one request")
                yield at, line
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; name a trace file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; a trace is JSON lines or CSV, not compressed") from None


# ---------------------------------------------------------------- JSON lines


def _read_json(rows: _Rows, first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> None:
    for line, text in (first, *rest):
        if not text.strip():
            continue
        fail = rows.fail_at(line)
        try:
            row = json.loads(text)
        except ValueError as error:
            fail(f"not a whole JSON object ({error}); the line may be cut off: copy the file again, or delete the line")
        if not isinstance(row, dict):
            fail(f"a JSON {type(row).__name__}, not an object; a request is an object with {', '.join(_COMMON)}")
        _json_request(rows, line, row, fail)


def _json_request(rows: _Rows, line: int, row: dict[str, Any], fail: Fail) -> None:
    form = "agentic" if "hash_runs" in row else "mooncake"
    known = _FIELDS[form]
    for name in row:
        if name not in known:
            fail(f"unknown field {name!r}; a request of this form has {', '.join(known)}")
    for name in known:
        if name not in row:
            fail(f"the field {name!r} is missing; a request of this form has {', '.join(known)}")
    block = _integer(row, "block_size", fail, least=1) if form == "agentic" else MOONCAKE_BLOCK
    if rows.form and (rows.form, rows.block) != (form, block):
        fail(
            f"{form} with blocks of {block} tokens after {rows.form} with {rows.block}; "
            "split the file by form and block"
        )
    rows.form, rows.block = form, block
    firsts, spans = _runs(row["hash_runs"], fail) if form == "agentic" else (_ids(row["hash_ids"], fail), None)
    count = len(firsts) if spans is None else sum(spans)
    tokens = _integer(row, "input_length", fail, least=1)
    if count not in (tokens // block, -(-tokens // block)):
        fail(
            f"{tokens} input tokens are {-(-tokens // block)} blocks of {block} (or {tokens // block}, without the "
            f"last part), but there are {count} ids; correct input_length or the ids"
        )
    rows.references += count
    if rows.references > MOST_REFERENCES:
        fail(f"more than {MOST_REFERENCES} blocks up to here; split the file")
    rows.lines.append(line)
    rows.arrivals.append(_seconds(row["timestamp"], fail))
    rows.inputs.append(tokens)
    rows.outputs.append(_integer(row, "output_length", fail))
    rows.sessions.append(_integer(row, "session_id", fail) if form == "agentic" else NO_SESSION)
    rows.counts.append(count)
    rows.firsts += firsts
    rows.spans += [1] * count if spans is None else spans


def _integer(row: dict[str, Any], name: str, fail: Fail, *, least: int = 0) -> int:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int):
        fail(f"{name} is {value!r}; it must be a whole number")
    if not least <= value <= MOST_TOKENS:
        fail(f"{name} is {value}; it must be in {least} to {MOST_TOKENS}")
    return value


def _seconds(value: object, fail: Fail) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e16:
        fail(f"timestamp is {value!r}; it must be milliseconds, 0 or more")
    return value / 1000


def _ids(value: object, fail: Fail) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 1 << 62 for v in value):
        fail("hash_ids must be a list of whole numbers from 0 to 2**62")
    return value


def _runs(value: object, fail: Fail) -> tuple[list[int], list[int]]:
    values = _ids(value, fail)
    if len(values) % 2:
        fail(f"hash_runs has {len(values)} numbers; it must be pairs of a first id and a count")
    if values[1::2] and not 1 <= min(values[1::2]) <= max(values[1::2]) <= MOST_TOKENS:
        fail(f"a count in hash_runs is outside 1 to {MOST_TOKENS}")
    return values[::2], values[1::2]


# ---------------------------------------------------------------- CSV


def _read_csv(rows: _Rows, first: tuple[int, str], rest: Iterator[tuple[int, str]], block: int) -> None:
    header = [name.strip() for name in next(csv.reader([first[1]]))]
    if header != list(_AZURE):
        rows.fail_at(first[0])(f"the header is {','.join(header)}; it must be {','.join(_AZURE)}")
    rows.form, rows.block = "azure", block
    next_id = 0
    for line, text in rest:
        if not text.strip():
            continue
        fail = rows.fail_at(line)
        cells = next(csv.reader([text]))
        if len(cells) != len(header):
            fail(f"{len(cells)} values instead of {len(header)}; the line may be cut off: copy the file again")
        tokens = _cell(cells[1], _AZURE[1], fail, least=1)
        count = -(-tokens // block)
        rows.lines.append(line)
        rows.arrivals.append(_moment(cells[0], fail))
        rows.inputs.append(tokens)
        rows.outputs.append(_cell(cells[2], _AZURE[2], fail))
        rows.sessions.append(NO_SESSION)
        rows.counts.append(count)
        rows.firsts.append(next_id)
        rows.spans.append(count)
        next_id += count


def _cell(text: str, name: str, fail: Fail, *, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        fail(f"{name} is {text.strip()!r}; it must be a whole number")
    return _integer({name: value}, name, fail, least=least)


def _moment(text: str, fail: Fail) -> float:
    try:
        return datetime.fromisoformat(text.strip()[:26]).timestamp()
    except ValueError:
        fail(f"TIMESTAMP is {text.strip()!r}; it must look like 2023-11-16 18:17:03.979960")
