"""Reading trace files.  A bad file raises InputError with the file, the line and what to do about it.

Forms: Mooncake (JSON lines with ``hash_ids``), agentic (JSON lines with ``session_id``, ``block_size`` and
``hash_runs``, which is [first id, count, first id, count, ...]), Azure (CSV with lengths only: every prompt is unique).
"""

from __future__ import annotations

import csv
import re
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.errors import InputError
from kvloom.replay.codec import is_first_line
from kvloom.replay.lines import Fail, Lines, check_names, fail_at, json_object, read_lines, shown
from kvloom.replay.recording import Recording, read_recording
from kvloom.replay.trace import NO_SESSION, Trace, make_trace
from kvloom.types import IntArray

MOONCAKE_BLOCK = 512
LENGTHS_BLOCK = 128
"""Tokens per block where a trace has lengths only."""
MOST_TOKENS = 1 << 27
"""A longer prompt or answer is taken for a mistake."""
MOST_REFERENCES = 1 << 30

_COMMON = ("timestamp", "input_length", "output_length")
_FIELDS = {
    "mooncake": (*_COMMON, "hash_ids"),
    "agentic": (*_COMMON, "session_id", "block_size", "hash_runs"),
}
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


def read_trace(path: Path, *, block: int | None = None) -> Trace:
    """Read a trace file of any known form; ``block`` is the block of a form that has lengths only.

    Raises InputError: unreadable, empty, of no known form, or bad at a line that is named.
    """
    found = read_input(path, block=block)
    if isinstance(found, Recording):
        raise InputError(f"{path}, line 1: a recording of a run, not a trace; replay it with: kvloom replay {path}")
    return found


def read_input(path: Path, *, block: int | None = None) -> Trace | Recording:
    """Read what ``kvloom replay`` takes: a trace as ``read_trace`` does, or a recording, known by its first line."""
    rows = _Rows(path)
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}, line 1: the file is empty; a trace has one request per line")
    lines = chain((first,), lines)
    if is_first_line(first[1]):
        return read_recording(path, lines)
    if first[1].lstrip().startswith(("{", "[")):
        _read_json(rows, lines)
    elif "ContextTokens" in first[1]:
        _read_csv(rows, lines, block or LENGTHS_BLOCK)
    else:
        raise InputError(
            f"{path}, line {first[0]}: neither a JSON object nor the header {','.join(_AZURE)}; a trace is JSON lines "
            "with hash_ids or hash_runs, or such a CSV file"
        )
    if not rows.inputs:
        raise InputError(f"{path}, line {first[0]}: no request after the header; a trace has one request per line")
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

    def add(self, line: int, arrival: float, tokens: int, output: int, session: int, count: int, fail: Fail) -> None:
        """A request, but for the ids of its ``count`` blocks."""
        self.references += count
        if self.references > MOST_REFERENCES:
            fail(f"more than {MOST_REFERENCES} blocks up to here; split the file")
        self.lines.append(line)
        self.arrivals.append(arrival)
        self.inputs.append(tokens)
        self.outputs.append(output)
        self.sessions.append(session)
        self.counts.append(count)

    def trace(self) -> Trace:
        firsts, spans = _int64(self.firsts), _int64(self.spans)
        begins = np.cumsum(spans) - spans
        ids = np.repeat(firsts - begins, spans) + np.arange(int(spans.sum()), dtype=np.int64)
        return make_trace(
            name=self.path.name,
            source=str(self.path),
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


# ---------------------------------------------------------------- JSON lines


def _read_json(rows: _Rows, lines: Lines) -> None:
    for line, text in lines:
        fail = fail_at(rows.path, line)
        row = json_object(text, fail, f"a request is an object with {', '.join(_COMMON)}")
        _json_request(rows, line, row, fail)


def _json_request(rows: _Rows, line: int, row: dict[str, Any], fail: Fail) -> None:
    form = "agentic" if "hash_runs" in row else "mooncake"
    known = _FIELDS[form]
    check_names(row, known, known, "a request of this form", fail)
    block = _integer(row, "block_size", fail, least=1) if form == "agentic" else MOONCAKE_BLOCK
    if rows.form and (rows.form, rows.block) != (form, block):
        fail(
            f"{form} with blocks of {block} tokens after {rows.form} with {rows.block}; "
            "split the file by form and block"
        )
    rows.form, rows.block = form, block
    firsts = _ids(row["hash_ids"], "hash_ids", fail) if form == "mooncake" else []
    spans = [1] * len(firsts)
    if form == "agentic":
        firsts, spans = _runs(row["hash_runs"], fail)
    count = sum(spans)
    tokens = _integer(row, "input_length", fail, least=1)
    if count not in (tokens // block, -(-tokens // block)):
        fail(
            f"{tokens} input tokens are {-(-tokens // block)} blocks of {block} (or {tokens // block}, without the "
            f"last part), but there are {count} ids; correct input_length or the ids"
        )
    arrival = _seconds(row["timestamp"], fail)
    session = _integer(row, "session_id", fail) if form == "agentic" else NO_SESSION
    rows.add(line, arrival, tokens, _integer(row, "output_length", fail), session, count, fail)
    rows.firsts += firsts
    rows.spans += spans


def _integer(row: dict[str, Any], name: str, fail: Fail, *, least: int = 0) -> int:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int):
        fail(f"{name} is {shown(value)}; it must be a whole number")
    if not least <= value <= MOST_TOKENS:
        fail(f"{name} is {shown(value)}; it must be in {least} to {MOST_TOKENS}")
    return value


def _seconds(value: object, fail: Fail) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e16:
        fail(f"timestamp is {shown(value)}; it must be milliseconds, 0 or more and below 1e16")
    return value / 1000


def _ids(value: object, name: str, fail: Fail) -> list[int]:
    if not isinstance(value, list):
        fail(f"{name} is {shown(value)}; it must be a list of whole numbers")
    for at, number in enumerate(value):
        if type(number) is not int or not 0 <= number < 1 << 62:
            fail(f"{name}[{at}] is {shown(number)}; it must be a list of whole numbers from 0 to 2**62 - 1")
    return value


def _runs(value: object, fail: Fail) -> tuple[list[int], list[int]]:
    values = _ids(value, "hash_runs", fail)
    if len(values) % 2:
        fail(f"hash_runs has {len(values)} numbers; it must be pairs of a first id and a count")
    for count in values[1::2]:
        if not 1 <= count <= MOST_TOKENS:
            fail(f"a count in hash_runs is {count}; it must be in 1 to {MOST_TOKENS}")
    return values[::2], values[1::2]


# ---------------------------------------------------------------- CSV


def _read_csv(rows: _Rows, lines: Lines, block: int) -> None:
    at, text = next(lines)
    fail = fail_at(rows.path, at)
    header = [name.strip() for name in _cells(text, fail)]
    if header != list(_AZURE):
        fail(f"the header is {shown(','.join(header))}; it must be {','.join(_AZURE)}")
    rows.form, rows.block = "azure", block
    next_id = 0
    for line, text in lines:
        fail = fail_at(rows.path, line)
        cells = _cells(text, fail)
        if len(cells) != len(header):
            fail(f"{len(cells)} values instead of {len(header)}; the line may be cut off: copy the file again")
        tokens = _cell(cells[1], _AZURE[1], fail, least=1)
        count = -(-tokens // block)
        rows.add(line, _moment(cells[0], fail), tokens, _cell(cells[2], _AZURE[2], fail), NO_SESSION, count, fail)
        rows.firsts.append(next_id)
        rows.spans.append(count)
        next_id += count


def _cells(text: str, fail: Fail) -> list[str]:
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        fail(f"not a line of CSV ({error}); copy the file again, or delete the line")


def _cell(text: str, name: str, fail: Fail, *, least: int = 0) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        fail(f"{name} is {shown(text.strip())}; it must be a whole number")
    return _integer({name: int(text)}, name, fail, least=least)


def _moment(text: str, fail: Fail) -> float:
    try:
        return datetime.fromisoformat(text.strip()[:26]).timestamp()
    except (ValueError, OverflowError):
        fail(f"TIMESTAMP is {shown(text.strip())}; it must look like 2023-11-16 18:17:03.979960")
