"""Trace files: three forms, and every bad file is a sentence with the file, the line and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.replay.plain import AGENTIC, AZURE, CONVERSATION, write_jsonl

from kvloom.errors import InputError
from kvloom.replay.readers import read_trace
from kvloom.replay.trace import renumber

MOONCAKE = {"timestamp": 5, "input_length": 1000, "output_length": 3, "hash_ids": [7, 9]}
AGENT = {
    "timestamp": 5,
    "session_id": 1,
    "input_length": 1000,
    "output_length": 3,
    "block_size": 256,
    "hash_runs": [4, 3, 90, 1],
}
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,300,10\n2023-11-16 18:17:04.0319600,7,8\n"


@pytest.mark.parametrize(
    ("path", "form", "block", "requests"),
    [(CONVERSATION, "mooncake", 512, 300), (AGENTIC, "agentic", 256, 400), (AZURE, "azure", 128, 200)],
)
def test_the_three_forms(path: Path, form: str, block: int, requests: int) -> None:
    trace = read_trace(path)
    assert (trace.form, trace.block, len(trace)) == (form, block, requests)
    assert (np.diff(trace.arrivals) >= 0).all()
    assert trace.arrivals[0] == 0
    rows = path.read_text().splitlines()[form == "azure" :]
    if form == "azure":
        assert trace.inputs.tolist() == [int(row.split(",")[1]) for row in rows]
        assert trace.unique == trace.blocks.size == sum(-(-n // 128) for n in trace.inputs.tolist())
        return
    parsed = [json.loads(row) for row in rows]
    assert trace.inputs.tolist() == [row["input_length"] for row in parsed]
    assert trace.outputs.tolist() == [row["output_length"] for row in parsed]
    original: dict[int, int] = {}
    for i, row in enumerate(parsed):
        runs = row.get("hash_runs", [])
        ids = row.get("hash_ids") or [x for r in range(0, len(runs), 2) for x in range(runs[r], sum(runs[r : r + 2]))]
        ours = trace.request(i).tolist()
        assert len(ids) == len(ours)
        assert all(original.setdefault(a, b) == b for a, b in zip(ids, ours, strict=True))
    assert len(original) == len(set(original.values())) == trace.unique
    first = list(dict.fromkeys(trace.blocks.tolist()))
    assert first == list(range(trace.unique))  # numbered by first appearance


def test_requests_are_put_into_order_of_arrival(tmp_path: Path) -> None:
    rows = [
        {**MOONCAKE, "timestamp": 9000, "hash_ids": [7, 9]},
        {**MOONCAKE, "timestamp": 2000, "hash_ids": [7, 8], "output_length": 5},
        {**MOONCAKE, "timestamp": 9000, "hash_ids": [3], "input_length": 12},
    ]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", rows))
    assert trace.arrivals.tolist() == [0, 7, 7]
    assert [trace.request(i).tolist() for i in range(3)] == [[0, 1], [0, 2], [3]]
    assert (trace.inputs.tolist(), trace.outputs.tolist()) == ([1000, 1000, 12], [5, 3, 3])


def test_large_sparse_ids_and_blank_lines(tmp_path: Path) -> None:
    rows = [{**MOONCAKE, "hash_ids": [2**61, 5]}, {**MOONCAKE, "hash_ids": [2**61, 1]}]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    path.write_text("\n" + path.read_text().replace("}\n", "}\n\n"))
    assert read_trace(path).blocks.tolist() == [0, 1, 0, 2]
    assert renumber(np.zeros(0, dtype=np.int64))[1] == 0


def test_the_block_of_a_trace_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    assert read_trace(path).depths().tolist() == [3, 1]
    assert read_trace(path, block=64).depths().tolist() == [5, 1]


def test_the_last_part_of_a_prompt_may_have_no_id(tmp_path: Path) -> None:
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", [{**AGENT, "hash_runs": [4, 3]}]))
    assert trace.depths().tolist() == [3]


def bad(base: dict[str, object], **change: object) -> str:
    return json.dumps({k: v for k, v in {**base, **change}.items() if v is not ...})


GOOD = json.dumps(MOONCAKE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty", "one request per line"]),
        ("\n \n", ["empty"]),
        (GOOD + "\n" + GOOD[:40], ["line 2", "cut off", "copy the file again"]),
        (GOOD + "\n[1]\n", ["line 2", "list", "object"]),
        (bad(MOONCAKE, colour="red"), ["line 1", "unknown field 'colour'", "hash_ids"]),
        (bad(AGENT, hash_ids=[1]), ["line 1", "unknown field 'hash_ids'"]),
        (bad(MOONCAKE, output_length=...), ["line 1", "'output_length' is missing"]),
        (bad(MOONCAKE, input_length=-5), ["line 1", "input_length is -5", "1 to"]),
        (bad(MOONCAKE, output_length=-1), ["output_length is -1", "0 to"]),
        (bad(MOONCAKE, input_length=1 << 40), ["input_length", "1 to"]),
        (bad(MOONCAKE, input_length=1.5), ["input_length is 1.5", "whole number"]),
        (bad(MOONCAKE, input_length=True), ["input_length is True"]),
        (bad(MOONCAKE, timestamp="noon"), ["timestamp is 'noon'", "milliseconds"]),
        (bad(MOONCAKE, timestamp=-1), ["timestamp is -1"]),
        (bad(MOONCAKE).replace('"timestamp": 5', '"timestamp": NaN'), ["timestamp is nan"]),
        (bad(MOONCAKE).replace('"timestamp": 5', '"timestamp": 1e400'), ["timestamp is inf", "milliseconds"]),
        (bad(MOONCAKE, input_length=float("nan")), ["input_length is nan", "whole number"]),
        (bad(MOONCAKE, input_length=None), ["input_length is None", "whole number"]),
        (bad(MOONCAKE, input_length="1000"), ["input_length is '1000'", "whole number"]),
        (bad(MOONCAKE, input_length=[1] * 1000), ["input_length is [1, 1, 1, 1, 1, 1, ...]", "whole number"]),
        (bad(MOONCAKE, input_length=0, hash_ids=[]), ["input_length is 0", "1 to"]),
        (bad(MOONCAKE, output_length=10**30), ["output_length is 1000000000", "0 to"]),
        (
            GOOD + "\n" + bad(MOONCAKE).replace("1000", "9" * 5000),
            ["line 2", "a number is too large", "delete the line"],
        ),
        (GOOD + "\n" + "[" * 100_000, ["line 2", "nested too deeply", "a request is an object with timestamp"]),
        (GOOD + "\n" + '{"a":' * 100_000, ["line 2", "nested too deeply"]),
        (GOOD + "\n" + "null", ["line 2", "NoneType", "a request is an object with timestamp"]),
        ("[1, 2]", ["line 1", "list", "a request is an object with timestamp"]),
        (GOOD + "\n" + bad({**MOONCAKE, "x" * 1000: 1}), ["line 2", "unknown field 'xxx", "...", "hash_ids"]),
        (GOOD + "\n" + GOOD + GOOD, ["line 2", "Extra data", "copy the file again"]),
        (bad(AGENT, session_id="me"), ["line 1", "session_id is 'me'"]),
        (bad(AGENT, hash_runs=[1.0, 3, 90, 1]), ["line 1", "hash_runs[0] is 1.0", "a list of whole numbers"]),
        (bad(AGENT, hash_runs={"a": 1}), ["line 1", "hash_runs is {'a': 1}", "a list"]),
        (bad(MOONCAKE, hash_ids=[1, float("nan")]), ["line 1", "hash_ids[1] is nan", "a list of whole numbers"]),
        (bad(MOONCAKE, hash_ids=[1 << 62, 1]), ["line 1", "hash_ids", "2**62 - 1"]),
        (bad(MOONCAKE, hash_ids=[True, 1]), ["line 1", "hash_ids[0] is True"]),
        (bad(MOONCAKE, hash_ids="abc"), ["hash_ids", "whole numbers"]),
        (bad(MOONCAKE, hash_ids=[1, -2]), ["hash_ids", "from 0"]),
        (bad(MOONCAKE, hash_ids=[1, 2, 3, 4]), ["1000 input tokens are 2 blocks of 512", "there are 4 ids"]),
        (bad(AGENT, hash_runs=[1, 2, 3]), ["hash_runs has 3 numbers", "pairs"]),
        (bad(AGENT, hash_runs=[1, 0]), ["a count in hash_runs", "1 to"]),
        (bad(AGENT, hash_runs=[1, 1 << 60]), ["a count in hash_runs"]),
        (bad(AGENT, block_size=0), ["block_size is 0", "1 to"]),
        (GOOD + "\n" + bad(AGENT), ["line 2", "agentic with blocks of 256 tokens after mooncake with 512", "split"]),
        (GOOD + "\n" + bad(MOONCAKE, hash_ids=[9, 7]), ["line 2", "block id 9", "prefix hashes"]),
        (bad(MOONCAKE, hash_ids=[7, 7]), ["line 1", "block id 7", "prefix hashes"]),
        ("hello\n", ["line 1", "hash_ids", "TIMESTAMP,ContextTokens"]),
        ("TIMESTAMP,ContextTokens\n1,2\n", ["line 1", "the header is", "GeneratedTokens"]),
        (CSV.splitlines()[0], ["no request after the header"]),
        (CSV + "2023-11-16 18:17:04.03", ["line 4", "1 values instead of 3", "cut off"]),
        (CSV + "2023-11-16 18:17:05,-3,1", ["line 4", "ContextTokens is -3"]),
        (CSV + "2023-11-16 18:17:05,many,1", ["line 4", "ContextTokens is 'many'"]),
        (CSV + "soon,3,1", ["line 4", "TIMESTAMP is 'soon'", "2023-11-16"]),
        (CSV + "0001-01-01 00:00:00,3,1", ["line 4", "TIMESTAMP is '0001"]),
        (CSV + "2023-11-16 18:17:05,nan,1", ["line 4", "ContextTokens is 'nan'", "whole number"]),
        (CSV + "2023-11-16 18:17:05,1e3,1", ["line 4", "ContextTokens is '1e3'", "whole number"]),
        (CSV + f"2023-11-16 18:17:05,3,{'9' * 5000}", ["line 4", "GeneratedTokens is '999", "whole number"]),
        (CSV + f"2023-11-16 18:17:05,{10**17},1", ["line 4", f"ContextTokens is {10**17}", "1 to"]),
        (CSV + '2023-11-16 18:17:05,"3,1', ["line 4", "not a line of CSV", "copy the file again"]),
        (CSV + f"2023-11-16 18:17:05,{'9' * 140_000},1", ["line 4", "not a line of CSV (field larger"]),
        (CSV + "2023-11-16 18:17:05,3,1,4", ["line 4", "4 values instead of 3"]),
    ],
)
def test_bad_traces(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line ")
    assert len(message) < 400
    assert ";" in message  # what to do about it
    for word in words:
        assert word in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="name a trace file"):
        read_trace(tmp_path)
    (tmp_path / "t.gz").write_bytes(b"\x1f\x8b\xff\xff")
    with pytest.raises(InputError, match="line 1: compressed with gzip, not text; unpack it first, with gunzip"):
        read_trace(tmp_path / "t.gz")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff\xfe{\x00", ["line 1", "not UTF-8", "byte 0 of the line", "convert it"]),
        (GOOD.encode() + b"\n\n" + b'{"a": "\xe9"}\n', ["line 3", "not UTF-8", "byte 7 of the line"]),
        (b"\x7fELF\x02\x01\x01\x00\xf0", ["line 1", "not UTF-8"]),
        (b"\x00\x01\x02", ["line 1", "neither a JSON object nor the header"]),
        (b"\x28\xb5\x2f\xfd\x00", ["line 1", "zstd", "unzstd"]),
        (b"PK\x03\x04\x00", ["line 1", "zip", "unzip"]),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, raw: bytes, words: list[str]) -> None:
    path = tmp_path / "trace"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert all(word in str(caught.value) for word in [f"{path}, line", *words]), caught.value


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + GOOD.encode() + b"\r\n")
    assert len(read_trace(path)) == 2
    path.write_bytes(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode())
    assert read_trace(path).inputs.tolist() == [300, 7]
