"""Arguments of odd types, absurd sizes, another prompt than the one opened: typed errors, and nothing changes."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.adapters.transformers import attach  # noqa: E402
from kvloom.errors import ConfigError, InputError, SpecError, UnsupportedError  # noqa: E402
from kvloom.spec.from_config import spec_from_config  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.types import Grade  # noqa: E402

ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 10**12}, "block_size: must be from 1 to 65536"),
    ({"block_size": 16.0}, "block_size: must be a whole number"),
    ({"block_size": "16"}, "block_size: must be a whole number"),
    ({"block_size": True}, "block_size: must be a whole number"),
    ({"block_size": float("nan")}, "block_size: must be a whole number"),
    ({"segment": 10**12}, "segment: 1000000000000 tokens are more than the 1048576"),
    ({"segment": 10**40}, "more than the 1048576"),
    ({"segment": 32.0}, "segment: must be a whole number"),
    ({"segment": "32"}, "segment: must be a whole number"),
    ({"snapshot_interval": 1.5}, "snapshot_interval: must be a whole number"),
    ({"snapshot_interval": 2**40}, "snapshot_interval: 1099511627776 is more than"),
    ({"max_sequences": 10**12}, "max_sequences is 1000000000000; use a whole number from 1 to 65536"),
    ({"max_sequences": 1.5}, "max_sequences is 1.5"),
    ({"max_sequences": None}, "max_sequences is None"),
    ({"device": 4e6}, "size 4000000.0"),
]


@pytest.mark.parametrize(("options", "message"), ABSURD)
def test_options_of_attach(lab: Any, options: dict[str, Any], message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        attach(lab.model("gpt_oss"), **options)
    assert time.monotonic() - begun < 20


def test_blocks_without_a_common_multiple_of_sensible_size() -> None:
    rates = {"compressed_sparse_attention": 97, "heavily_compressed_attention": 101}
    config = tiny_config("deepseek_v4", compress_rates=rates)
    assert spec_from_config(config, block_size=16).lcm_tokens == 97 * 101 * 16
    with pytest.raises(ConfigError, match=r"LCM of all blocks .* more than the 1048576"):
        spec_from_config(config, block_size=65_536)


def test_a_window_beyond_what_can_be_counted() -> None:
    with pytest.raises(SpecError, match="'sliding_window' must be at most 2147483647"):
        spec_from_config(tiny_config("mistral", sliding_window=2**40))
    with pytest.raises(SpecError, match="a window of 2147483647 tokens"):
        spec_from_config(tiny_config("mistral", sliding_window=2**31 - 1))


@pytest.mark.parametrize("model", [None, "gpt2", 3, torch.nn.Linear(2, 2)], ids=repr)
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(InputError, match="attach takes a loaded transformers model"):
        attach(model)


def test_models_that_cannot_answer(lab: Any) -> None:
    with pytest.raises(UnsupportedError, match="no logits"):
        attach(lab.model("gpt_oss").model)
    with torch.device("meta"):
        model = type(lab.model("gpt_oss"))(tiny_config("gpt_oss")).eval()
    with pytest.raises(UnsupportedError, match="meta"):
        attach(model)


def test_a_model_without_attention_is_refused_with_the_reason_of_transformers() -> None:
    model = random_model(tiny_config("lfm2", layer_types=["conv"] * 2))
    with pytest.raises(UnsupportedError, match=r"transformers itself cannot run this model on a cache.*get_seq_length"):
        attach(model)


def test_floors_and_keys(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(77)
    lab.answer(engine, ids)
    with engine.open(ids, floor="canonical") as session:
        assert (session.reused, session.grade) == (64, Grade.CANONICAL)
    for options in (
        {"floor": "best"},
        {"floor": 99},
        {"floor": None},
        {"salt": "tenant"},
        {"extra_keys": None},
        {"extra_keys": "ab"},
        {"extra_keys": {"lora": "x"}},
        {"extra_keys": [("lora", 1.5)]},
    ):
        with pytest.raises(InputError, match=next(iter(options)).split("_")[0]):
            engine.open(ids, **options)
    assert lab.held(engine) == 0


def test_steps_end_within_the_prompt(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    with engine.open(ids) as session:
        for end in (-5, 0, 41, 40.5, 40.0, None, "3", float("nan"), True):
            with pytest.raises(InputError, match="end"):
                session.step(end)
            assert session.length == 0
        session.step(39)
        assert session.length == 32
        with pytest.raises(InputError, match="use 33 to 40"):
            session.step(32)
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))
        with pytest.raises(InputError, match="all 40 tokens of the prompt are computed"):
            session.step(40)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_another_prompt_of_the_same_length_is_noticed_where_the_model_sees_it(lab: Any, family: str) -> None:
    engine, ids = lab.engine(family), lab.ids(40)
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 320
    with engine.open(ids) as session:
        session.prefill()
        before = engine.arena.bytes.clone()
        with pytest.raises(InputError, match=f"token {int(other[0, -1])} at position 39 is not that of the session's"):
            engine.model.generate(other, past_key_values=session.cache, max_new_tokens=2)
        assert torch.equal(engine.arena.bytes, before)
        with session.fork() as fork, session.fork(other) as second:  # a fork says what it goes on with, or nothing
            for branch in (fork, second):
                engine.model(other[:, 39:], past_key_values=branch.cache)
                assert branch.sequence.tokens[-1] == other[0, -1]
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))
        engine.model(torch.tensor([[7]]), past_key_values=session.cache)  # beyond the prompt anything goes
        assert session.length == 41
    with engine.open(ids) as session, pytest.raises(InputError, match="at position 39"):
        engine.model(other, past_key_values=session.cache)
