"""Bad input to the manager: a typed error that says what, where and how to fix it, and nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.core import specs
from tests.core.workshop import KIB, engine, holdings, ids, prompt_of, view

from kvloom.config import Device
from kvloom.errors import CapacityError, ConfigError, InputError, KVLoomError, WrongThreadError
from kvloom.manager import Manager
from kvloom.types import Grade, Kind


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        (np.zeros(0, dtype=np.int32), "empty"),
        (np.zeros((2, 3), dtype=np.int32), "not 2-D"),
        (np.int32(3), "not 0-D"),
        ([1.0, 2.0], "float64"),
        ("text", "1-D array of integers"),
        (b"bytes", "1-D array of integers"),
        (None, "1-D array of integers"),
        ([1, None], "object"),
        ([[1], [1, 2]], "1-D array of integers"),
        ([True, False], "bool"),
        ([1, 2, -3], "token -3 at position 2"),
        ([1, 100], "token 100 at position 1 is outside the vocabulary, 0 to 99"),
        ([2**31], "token 2147483648"),
        ([2**63], "token 9223372036854775808"),
        ([2**80], "token 1208925819614629174706176 at position 0 is outside"),
        ([1, -(2**80)], "token -1208925819614629174706176 at position 1 is outside"),
        ([2**9999], "token of 10000 bits at position 0 is outside"),
        ({1, 2}, "not set; pass a list"),
        (np.array([1, "a"], dtype=object), "position 1 is 'a'"),
        (np.array([2**64 - 1], dtype=np.uint64), "18446744073709551615"),
    ],
)
def test_tokens_that_are_none(tokens: Any, message: str) -> None:
    e = engine(specs.FULL, 64)
    s = e.open([1, 2, 3])
    e.step(s, [1, 2])
    held, seen = holdings(e.manager), view(e.manager, s)
    for act in (e.manager.open, s.append):
        with pytest.raises(InputError) as refused:
            act(tokens)
        assert message in str(refused.value) or (act == s.append and "position" in message)
    assert holdings(e.manager) == held
    assert view(e.manager, s) == seen
    e.step(s, [1, 2])


def test_positions_in_messages_count_from_the_start_of_the_sequence() -> None:
    e = engine(specs.FULL, 64)
    s = e.open([1, 2, 3])
    e.step(s, [1, 2])
    with pytest.raises(InputError, match="token 500 at position 4"):
        s.append([1, 1, 500])


def test_longer_than_the_model_allows() -> None:
    e = engine(specs.THREE_SEGMENTS, 300)
    with pytest.raises(InputError, match="97 tokens are more than the 96 positions"):
        e.open(prompt_of(97))
    s = e.open(prompt_of(96))
    e.prefill(s, prompt_of(96))
    with pytest.raises(InputError, match="97 tokens"):
        s.append([1])
    e.check(s)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64", "uint64", ">i4", "<i8"])
def test_every_integer_type_is_taken(dtype: str) -> None:
    e = engine(specs.FULL, 64)
    e.request(prompt_of(20))
    assert e.manager.open(np.array(prompt_of(20), dtype=dtype)).reused == 19
    assert e.manager.open(np.repeat(np.array(prompt_of(20), dtype=dtype), 2)[::2]).reused == 19


def test_a_read_only_prompt_is_taken_and_a_prompt_may_change_afterwards() -> None:
    e = engine(specs.FULL, 64)
    e.request(prompt_of(20))
    prompt = ids(prompt_of(20))
    prompt.flags.writeable = False
    s = e.manager.open(prompt)
    assert s.reused == 19
    mine = ids(prompt_of(20))
    s = e.manager.open(mine)
    mine[:] = 7
    assert s.tokens.tolist() == prompt_of(19)
    with pytest.raises(ValueError, match="read-only"):
        s.tokens[0] = 7


def test_an_object_array_of_ids_is_taken() -> None:
    e = engine(specs.FULL, 64)
    e.request(prompt_of(20))
    assert e.manager.open(np.array(prompt_of(20), dtype=object)).reused == 19


def test_a_floor_is_a_grade_or_its_name() -> None:
    e = engine(specs.FULL, 64)
    e.request(prompt_of(40))
    assert e.open(prompt_of(40), floor="Canonical").reused == e.open(prompt_of(40), floor=Grade.CANONICAL).reused < 39
    for floor in ("best", 99, 1, None, float("nan"), True):
        with pytest.raises(InputError, match="floor"):
            e.open(prompt_of(40), floor=floor)


def test_the_grade_of_a_commit_and_the_group_of_a_table_are_checked() -> None:
    e = engine(specs.V4, 200)
    s = e.open([1, 2, 3])
    e.manager.step(e.manager.batch([]), np.zeros(0, dtype=np.int32))
    s.append([1])
    for grade in (99, "best", None):
        with pytest.raises(InputError, match="grade"):
            s.commit(grade)  # type: ignore[arg-type]
    e.compute(s, [1])
    s.commit("faithful")  # type: ignore[arg-type]
    assert s.length == 1
    for read in (s.block_table, s.first_block, s.num_blocks, s.published_blocks, s.live_slot):
        for group in (99, -1, "csa", 0.0, None):
            with pytest.raises(InputError, match="group index"):
                read(group)  # type: ignore[arg-type]


def test_salts_keys_groups_and_sizes() -> None:
    e = engine(specs.V4, 200)
    e.request(prompt_of(20))
    other = engine(specs.V4, 200).open([1, 2])
    mine = e.manager.batch([e.open([1, 2])])
    bad: list[Callable[[], Any]] = [
        lambda: e.open([1, 2], salt="text"),
        lambda: e.open([1, 2], extra_keys=["lora"]),
        lambda: e.open([1, 2], extra_keys=None),
        lambda: e.open([1, 2], extra_keys=3),
        lambda: e.open([1, 2], extra_keys="ab"),
        lambda: e.open([1, 2], extra_keys={"lora": "x"}),
        lambda: e.open([1, 2], extra_keys=("lora", "x")),
        lambda: e.open([1, 2], extra_keys=[("n", float("nan"))]),
        lambda: e.open([1, 2], extra_keys=[("n", 10**5000)]),
        lambda: e.manager.complete(None),  # type: ignore[arg-type]
        lambda: e.manager.abandon(3),  # type: ignore[arg-type]
        lambda: e.manager.evict(-1),
        lambda: e.manager.evict(1.5),  # type: ignore[arg-type]
        lambda: e.manager.evict("1MiB"),  # type: ignore[arg-type]
        lambda: e.manager.drop(None),  # type: ignore[arg-type]
        lambda: e.manager.drop("csa", -1),
        lambda: e.manager.drop("csa", "x"),  # type: ignore[arg-type]
        lambda: e.manager.peak_bytes(1.5),  # type: ignore[arg-type]
        lambda: e.manager.tier_needed(-1),
        lambda: e.manager.batch([3]),  # type: ignore[list-item]
        lambda: e.manager.batch([other]),
        lambda: e.manager.step(mine, [1]),  # type: ignore[arg-type]
        lambda: Manager(specs.FULL, [Device(64 * KIB)], max_sequences=1.5),  # type: ignore[arg-type]
        lambda: Manager(specs.FULL, [Device(64 * KIB)], max_sequences=10**12),
        lambda: Manager(specs.FULL, [Device(64 * KIB)], max_nodes="3"),  # type: ignore[arg-type]
        lambda: e.manager.clear("text"),  # type: ignore[arg-type]
        lambda: e.manager.drop("csaa"),
        lambda: Manager(specs.FULL, [], max_sequences=1),
        lambda: Manager(specs.FULL, [Device(64 * KIB)] * 2),
        lambda: Manager(specs.FULL, [Device(64 * KIB)], policy="fifo"),
        lambda: Manager(specs.FULL, [Device(64 * KIB)], max_sequences=0),
    ]
    for act in bad:
        with pytest.raises(InputError):
            act()
    with pytest.raises(InputError, match="csa, indexer, hca"):
        e.manager.drop("csaa")
    with pytest.raises(ConfigError, match="lru"):
        Manager(specs.FULL, [Device(64 * KIB)], policy="fifo")
    assert e.manager.drop(Kind.RECURRENT) == 0, "a kind that this model does not have"
    assert e.open(prompt_of(20)).reused == 19


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_an_arena_for_nothing_is_refused_with_the_bytes_that_it_takes(spec: Any) -> None:
    with pytest.raises(CapacityError, match="give it at least") as refused:
        Manager(spec, [Device(512)])
    s = Manager(spec, [Device(refused.value.needed)]).open([1, 2])
    assert s.reused == 0


def test_another_thread_is_refused_and_nothing_changes() -> None:
    m = Manager(specs.V4, [Device(200 * KIB)], thread_id=threading.get_ident)
    s = m.open(ids(prompt_of(20)))
    other = m.open(ids(prompt_of(20)))
    m.complete(s.restore)
    held = holdings(m)
    acts: list[Callable[[], Any]] = [
        lambda: m.open([1, 2]),
        lambda: m.complete(other.restore),
        lambda: m.abandon(other.restore),
        lambda: m.evict(1),
        m.clear,
        lambda: m.drop(Kind.TAIL),
        m.stats,
        m.check_integrity,
        lambda: s.append([1]),
        s.commit,
        s.rollback,
        s.checkpoint,
        s.fork,
        s.close,
        s.check,
        lambda: s.block_table(0),
    ]
    raised: list[BaseException] = []

    def elsewhere() -> None:
        for act in acts:
            try:
                act()
            except KVLoomError as error:
                raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert [type(error) for error in raised] == [WrongThreadError] * len(acts)
    assert "one manager per thread" in str(raised[0])
    assert holdings(m) == held
    m.complete(other.restore)
    s.append([1])
    m.complete(s.commit(Grade.FAITHFUL))
    s.close()
    other.close()
    m.check_integrity()


def test_the_caller_may_reuse_its_buffer_before_the_commit() -> None:
    e = engine(specs.FULL, 64)
    s = e.open(prompt_of(9))
    buffer = np.array(prompt_of(8), dtype=np.int32)
    s.append(buffer)
    e.compute(s, prompt_of(8))
    buffer[:] = 7
    s.commit()
    assert s.tokens.tolist() == prompt_of(8)
    assert e.open(prompt_of(9)).reused == 8
