"""Recordings that were cut off, changed or made up: a sentence with the file, the line and the fix, and never more."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core import specs
from tests.core.workshop import ids

from kvloom.config import Device
from kvloom.errors import InputError
from kvloom.manager.watched import WatchedManager
from kvloom.replay.readers import read_input
from kvloom.replay.recorder import Recorder
from kvloom.replay.recording import Recording
from kvloom.replay.rerun import rerun
from kvloom.spec.plain import spec_from_plain, spec_to_plain
from kvloom.spec.presets import PRESETS, load_preset

Rows = list[dict[str, Any]]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """A short run with every call: the objects of its lines."""
    path = tmp_path / "good.jsonl"
    with Recorder(path) as recorder:
        manager = WatchedManager(specs.V4, [Device("1MiB")], max_sequences=4, watch=recorder)
        one = manager.open(ids([*range(40)]), salt=b"a", extra_keys=(("lora", 1),), priority=2)
        manager.complete(one.restore)
        for begin in (0, 16):
            manager.complete(one.append(ids([*range(begin, begin + 16)])))
            manager.complete(one.commit())
        manager.complete(one.checkpoint())
        other, plan = one.fork()
        manager.complete(plan)
        batch = manager.batch([one, other])
        manager.step(batch, ids([1, 2]))
        manager.finish(batch)
        third = manager.open(ids([*range(40)]), salt=b"a", extra_keys=(("lora", 1),))
        manager.abandon(third.restore)
        one.append(ids([3]))
        one.rollback()
        for sequence in (one, other, third):
            sequence.close()
        with pytest.raises(InputError):
            manager.open([-1])
        manager.drop(manager.spec.groups[0].kind, 0)
        manager.drop("hca")
        manager.evict(1000)
        manager.clear(b"a")
        manager.clear()
        recorder.end(manager.stats())
    found = [json.loads(line) for line in path.read_text().splitlines()]
    ops = {row.get("op") for row in found[1:]}
    assert len(ops) == 17, ops
    return found


def written(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> Recording:
    found = read_input(path)
    assert isinstance(found, Recording)
    return found


def place(rows: Rows, op: str) -> int:
    return next(i for i, row in enumerate(rows) if row.get("op") == op)


def put(op: str, /, **change: object) -> Callable[[Rows], int]:
    """Change fields (... removes one) of the first line with ``op``; the number of the line."""

    def change_rows(rows: Rows) -> int:
        at = 0 if op == "first" else place(rows, op)
        rows[at] = {k: v for k, v in {**rows[at], **change}.items() if v is not ...}
        return at + 1

    return change_rows


def in_model(change: Callable[[dict[str, Any]], None]) -> Callable[[Rows], int]:
    def change_rows(rows: Rows) -> int:
        change(rows[0]["model"])
        return 1

    return change_rows


def group(**change: object) -> Callable[[Rows], int]:
    return in_model(lambda model: model["groups"][0].update(change))


def test_the_run_replays(rows: Rows, tmp_path: Path) -> None:
    recording = read(written(tmp_path / "run.jsonl", rows))
    report = rerun(recording)
    assert (report.same, report.difference) == (True, None)
    assert rerun(recording, policy="lfu", device=Device("64KiB")).same is None
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text("\n".join(json.dumps(row, indent=1).replace("\n", " ") for row in rows))
    assert rerun(read(spaced)).same


def what_is_wrong(path: Path) -> str:
    """The error, or the first difference; the exit code is 2 or 1."""
    try:
        report = rerun(read(path))
    except InputError as error:
        return str(error)
    return f"{path}, {report.difference}; exit code 1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("first", kvloom_recording=2), ["version 2", "reads 1", "record the run again"]),
        (put("first", kvloom_recording=True), ["version True"]),
        (put("first", colour="red"), ["unknown field 'colour'", "max_nodes"]),
        (put("first", device=...), ["the field 'device' is missing"]),
        (put("first", device=-1), ["device is -1", "1 to"]),
        (put("first", device=1.5), ["device is 1.5", "whole number"]),
        (put("first", device=10**40), ["device is 1000", "1 to"]),
        (put("first", policy=7), ["policy is 7", "a string"]),
        (put("first", policy="best"), ["policy 'best' is unknown", "--policy"]),
        (put("first", max_sequences=0), ["max_sequences is 0"]),
        (put("first", model=[]), ["model is a list", "an object with name"]),
        (in_model(lambda m: m.update(colour=1)), ["model: unknown field 'colour'"]),
        (in_model(lambda m: m.pop("groups")), ["model: the field 'groups' is missing"]),
        (in_model(lambda m: m.update(groups=[])), ["no layer keeps any state"]),
        (in_model(lambda m: m.update(groups=[1])), ["model.groups[0] is a int"]),
        (in_model(lambda m: m.update(segment_tokens=7)), ["segment: 7", "LCM"]),
        (in_model(lambda m: m.update(vocab_size=-1)), ["model.vocab_size is -1"]),
        (in_model(lambda m: m.update(identity=[["a"]])), ["model.identity", "pairs"]),
        (in_model(lambda m: m["groups"].append(m["groups"][0])), ["group names are not unique"]),
        (group(kind="cloud"), ["model.groups[0].kind is 'cloud'", "compressed"]),
        (group(kind="disk_prefix"), ["DISK_PREFIX is not a kind that a layer can hold"]),
        (group(kind="recurrent"), ["kind RECURRENT needs block_tokens = 0"]),
        (group(kind="window"), ["a window of 0 tokens"]),
        (group(ratio=0), ["model.groups[0].ratio is 0", "from 1"]),
        (group(ratio=3), ["block_tokens 8 is not a multiple of the ratio 3"]),
        (group(ratio=1 << 39, block_tokens=1 << 39), ["ratio", "more than"]),
        (group(layers=[]), ["at least one tensor and one layer"]),
        (group(layers=[0.5]), ["model.groups[0].layers is [0.5]"]),
        (group(tensors=[{}]), ["model.groups[0].tensors[0]: the field 'name' is missing"]),
        (put("open", op="leap"), ["op is 'leap'", "checkpoint"]),
        (put("open", op=["open"]), ["op is ['open']"]),
        (put("open", op=...), ["op is None"]),
        (put("open", seq=...), ["the field 'seq' is missing", "open has op, seq"]),
        (put("open", colour=1), ["unknown field 'colour'", "open has"]),
        (put("open", seq=-1), ["seq is -1", "0 to"]),
        (put("open", seq="1"), ["seq is '1'", "whole number"]),
        (put("open", seq=float("nan")), ["seq is nan"]),
        (put("open", tokens=[]), ["0 of 0 tokens reused", "record the run again"]),
        (put("open", tokens=[1, -2]), ["tokens is ", "must be a list of token ids"]),
        (put("open", tokens=[1, 1 << 31]), ["tokens is ", "must be a list of token ids"]),
        (put("open", tokens=[1, 1.0]), ["tokens is ", "must be a list of token ids"]),
        (put("open", tokens={"a": 1}), ["tokens is ", "must be a list of token ids"]),
        (put("open", tokens=[100]), ["token 100 at position 0 is outside the vocabulary"]),
        (put("open", salt="xyz"), ["salt is 'xyz'", "hexadecimal"]),
        (put("open", salt="a b "), ["salt is 'a b '", "hexadecimal"]),
        (put("open", keys=[["lora"]]), ["keys is ", "must be a list of [name, digest] pairs"]),
        (put("open", floor="superb"), ["floor is 'superb'", "canonical"]),
        (put("open", floor=1), ["floor is 1", "canonical"]),
        (put("open", reason="why not"), ["reason is 'why not'", "evicted"]),
        (put("open", kind="cloud"), ["kind is 'cloud'", "window"]),
        (put("open", priority=1 << 30), ["priority 1073741824 is too high"]),
        (put("open", reused=40), ["40 of 40 tokens reused", "record the run again"]),
        (put("append", seq=9), ["sequence 9 is not open here"]),
        (put("append", tokens=[5] * 20_000), ["it was refused: recorded no error, now no room to append"]),
        (put("commit", seq=9), ["sequence 9 is not open here"]),
        (put("commit", grade=None), ["grade is None"]),
        (put("step", batch=9), ["batch 9 was not made before"]),
        (put("step", tokens=[1]), ["takes int32 tokens of shape (2,)"]),
        (put("batch", seqs=[1, 1]), ["in the batch twice"]),
        (put("batch", seqs=[1, "2"]), ["seqs is ", "must be a list of whole numbers"]),
        (put("complete", plan=-1), ["plan is -1"]),
        (put("tick", by=0), ["by is 0", "1 to"]),
        (put("tick", by=10**12), ["by is 1000000000000", "1 to"]),
        (put("drop", kind=..., group="nobody"), ["no group 'nobody'"]),
        (put("drop", quarantine=1), ["quarantine is 1", "true or false"]),
        (put("drop", position=1.5), ["position is 1.5"]),
        (put("clear", salt=5), ["salt is 5"]),
        (put("end", kinds=[]), ["kinds is ", "must be an object"]),
        (put("end", kinds={"window": 5}), ["kinds is ", "must be an object"]),
        (put("end", kinds={"window": {"hits": "many"}}), ["kinds.window.hits is 'many'"]),
        (put("end", used=...), ["the field 'used' is missing"]),
    ],
)
def test_changed_lines(rows: Rows, tmp_path: Path, change: Callable[[Rows], int], words: list[str]) -> None:
    line = change(rows)
    path = written(tmp_path / "run.jsonl", rows)
    message = what_is_wrong(path)
    assert message.startswith(f"{path}, line {line}: "), message
    assert ";" in message
    assert "\n" not in message
    assert len(message) < 500
    for word in words:
        assert word in message


def test_lines_that_are_not_whole(rows: Rows, tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", rows)
    text = path.read_text()
    path.write_text(text[:-20])
    with pytest.raises(InputError, match=rf"line {len(rows)}: not a whole JSON object .*cut off.* delete the line"):
        read(path)
    path.write_text(text[:30])
    with pytest.raises(InputError, match="line 1: not a whole JSON object"):
        read(path)
    path.write_text(text + text.splitlines()[1])
    with pytest.raises(InputError, match=rf"line {len(rows) + 1}: after the end of the recording; delete the line"):
        read(path)
    path.write_bytes(text.encode()[:-3] + b"\xff}\n")
    with pytest.raises(InputError, match=rf"line {len(rows)}: not UTF-8 text"):
        read(path)
    path.write_text(text.splitlines()[0])  # interrupted before anything was asked
    assert rerun(read(path)).requests == 0


def test_any_change_is_a_sentence(rows: Rows, tmp_path: Path) -> None:
    """A thousand random changes: each is read as it is, or refused; nothing else is ever raised."""
    rng = random.Random(5)
    values = [
        None,
        True,
        -1,
        0,
        1,
        3,
        10**6,
        1 << 62,
        10**25,
        1.5,
        float("nan"),
        "",
        "x",
        "ff",
        [],
        [0],
        [1, 2],
        {},
        {"a": 1},
    ]
    path = tmp_path / "run.jsonl"
    refused = 0
    for _ in range(1000):
        changed = json.loads(json.dumps(rows))
        if rng.random() < 0.2:
            del changed[rng.randrange(1, len(changed))]
        else:
            _change(rng.choice([changed[0]["model"], *changed]), rng, values)
        message = what_is_wrong(written(path, changed))
        refused += "exit code 1" not in message
        assert message.startswith((f"{path}, line ", f"{path}, None"))
    assert 300 < refused < 1000


def _change(row: Any, rng: random.Random, values: list[Any]) -> None:
    """Put something else somewhere into a line."""
    name = rng.choice(list(row) if isinstance(row, dict) else range(len(row)))
    if isinstance(row[name], dict | list) and row[name] and rng.random() < 0.8:
        _change(row[name], rng, values)
    else:
        row[name] = rng.choice(values)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_specs_as_plain_values(name: str) -> None:
    spec = load_preset(name)
    plain = json.loads(json.dumps(spec_to_plain(spec)))
    assert spec_from_plain(plain) == spec
