"""Lost windows and tails made again over the compressed state that was kept: compared with cold runs and with what was
lost (exact replay), or labelled (bounded replay)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.core.workshop import squeezed  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from kvloom.adapters.transformers import Engine, attach  # noqa: E402
from kvloom.adapters.transformers import replay as replaying  # noqa: E402
from kvloom.adapters.transformers.device import TorchArena  # noqa: E402
from kvloom.adapters.transformers.forward import forward_chunk  # noqa: E402
from kvloom.adapters.transformers.state import layer_state  # noqa: E402
from kvloom.core.fields import COL_BASE, COLUMNS, SLOT_BASE, STATE  # noqa: E402
from kvloom.core.lifecycle import COMMITTED  # noqa: E402
from kvloom.errors import ConfigError, InputError, UnsupportedError  # noqa: E402
from kvloom.manager.ways import Way  # noqa: E402
from kvloom.spec.replay import Span, replayed_groups  # noqa: E402
from kvloom.testing.families import REAL_V4_RATIOS, random_model, tiny_config  # noqa: E402
from kvloom.types import Grade, Kind  # noqa: E402

FAMILIES = (
    "gpt_oss", "gemma2", "gemma3", "gemma4", "llama4", "olmo3", "exaone4", "ministral", "mistral", "deepseek_v4",
)  # fmt: skip
WITHOUT = ("qwen3_next", "qwen3_5", "kimi_linear", "lfm2", "lfm3", "falcon_h1", "granitemoehybrid")
LENGTHS = (20 * 32 + 12, 20 * 32 + 1)
"""Prompts whose end is ragged, and whose end is that of a segment."""


def replaying_engine(lab: Any, family: str, dtype: str = "float32", **options: Any) -> Engine:
    engine: Engine = lab.engine(family, dtype, **{"device": "16MiB", "replay": "auto", **options})
    assert engine.recoverer is not None
    return engine


def lose(engine: Engine) -> int:
    return engine.manager.drop(Kind.WINDOW) + engine.manager.drop(Kind.TAIL)


def objects(engine: Engine, *kinds: Kind) -> dict[tuple[int, int, int], bytes]:
    """The bytes of every cached object of these kinds, by node, group and column."""
    a, geometry = engine.manager.arrays, engine.manager.geometry
    raw, found = engine.arena.bytes.cpu().numpy(), {}
    for g, group in enumerate(engine.spec.groups):
        if group.kind in kinds:
            for column in range(a.group[g, COLUMNS]):
                slots = a.columns[:, a.group[g, COL_BASE] + column]
                for node in np.flatnonzero(slots >= 0).tolist():
                    if a.slot[a.group[g, SLOT_BASE] + slots[node], STATE] == COMMITTED:
                        at = geometry.slot_offset(g, int(slots[node]))
                        found[node, g, column] = raw[at : at + group.slot_bytes].tobytes()
    return found


def state_of(session: Any) -> dict[tuple[int, str], Any]:
    """Copies of every state tensor, by layer and name."""
    return {
        (index, name): tensor.clone()
        for index, layer in enumerate(session.cache.layers)
        for name, tensor in layer_state(layer).items()
    }


def furthest(one: dict[tuple[int, str], Any], other: dict[tuple[int, str], Any]) -> float:
    """The largest difference between two states."""
    assert one.keys() == other.keys()
    assert all(one[name].shape == other[name].shape for name in one)
    pairs = [(one[name].float(), other[name].float()) for name in one if one[name].numel()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def before_it_is_lost(engine: Engine, ids: Any) -> dict[tuple[int, str], Any]:
    """The state of a hit at the end of a prompt."""
    with engine.open(ids) as session:
        assert session.reused == len(session.tokens) - 1
        return state_of(session)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_replay_is_the_state_of_a_cold_run(lab: Any, family: str, length: int) -> None:
    engine, ids = replaying_engine(lab, family), lab.ids(length)
    lab.answer(engine, ids)
    state = before_it_is_lost(engine, ids)
    kept, lost = objects(engine, Kind.COMPRESSED, Kind.INDEXER), objects(engine, Kind.WINDOW, Kind.TAIL)
    assert lose(engine) > 0
    stats = engine.recoverer.recovery.stats
    with engine.open(ids) as session:
        assert session.reused == length - 1
        span = engine.recoverer.replayer.span(length - 1)
        assert stats.replayed_tokens == span.tokens < length // 2
        assert furthest(state_of(session), state) == 0.0, "made in the same calls"
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))
        assert session.grade is Grade.FAITHFUL
    after = objects(engine, Kind.COMPRESSED, Kind.INDEXER)
    assert {place: after[place] for place in kept} == kept, "what was cached was not rewritten"
    windows = {g for g, group in enumerate(engine.spec.groups) if group.kind is Kind.WINDOW}
    again = {place: data for place, data in objects(engine, Kind.WINDOW).items() if place in lost}
    assert again
    assert {place[1] for place in again} == windows
    assert all(lost[place] == data for place, data in again.items()), "the bytes that were lost"
    with engine.open(ids) as session:  # once made, it is a hit like any other
        assert session.reused == length - 1
    assert stats.replays == 1
    assert lab.held(engine) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_block_less_would_not_do(lab: Any, family: str) -> None:
    """The same run, begun later: the state differs, so the test above can fail."""
    engine, ids = replaying_engine(lab, family), lab.ids(LENGTHS[0])
    lab.answer(engine, ids)
    state = before_it_is_lost(engine, ids)
    lose(engine)
    replayer, step = engine.recoverer.replayer, engine.spec.lcm_tokens
    span = replayer.span(LENGTHS[0] - 1)

    def later(*_: Any, **__: Any) -> Span:
        return Span(span.position, span.start + step, exact=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvloom.manager.recovery.replay_span", later)
        with engine.open(ids) as session:
            assert session.reused == LENGTHS[0] - 1
            assert engine.recoverer.recovery.stats.replayed_tokens == span.tokens - step
            assert furthest(state_of(session), state) > 0.0


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "llama4", "deepseek_v4", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_that_decode_steps_made_is_replayed_in_chunks(lab: Any, family: str, dtype: str) -> None:
    """Other call shapes: faithful, and the answer is the same."""
    engine, ids = replaying_engine(lab, family, dtype), lab.ids(300)
    with engine.open(ids) as session:
        out = engine.model.generate(ids, past_key_values=session.prefill(), max_new_tokens=40, do_sample=False)
        response = torch.cat([ids, out[:, 300:]], dim=1)
    state = before_it_is_lost(engine, response)
    with engine.open(response) as session:
        want = lab.last(session, response)
    lose(engine)
    with engine.open(response) as session:
        assert session.reused == response.shape[1] - 1
        assert engine.recoverer.recovery.stats.replays == 1
        apart = furthest(state_of(session), state)
        found = lab.last(session, response)
        logits = float((found.float() - want.float()).abs().max())
        print(f"{family} {dtype}: state {apart:.1e}, logits {logits:.1e}")
        assert max(apart, logits) <= (1e-5 if dtype == "float32" else 0.25)
        assert dtype != "float32" or found.argmax() == want.argmax()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_the_same(lab: Any, family: str) -> None:
    engine, ids = replaying_engine(lab, family), lab.ids(LENGTHS[0], seed=3)
    options = {"max_new_tokens": 12, "do_sample": False}
    with engine.open(ids) as session:
        want = engine.model.generate(ids, past_key_values=session.prefill(), **options)
    lose(engine)
    with engine.open(ids) as session:
        assert session.reused == LENGTHS[0] - 1
        got = engine.model.generate(ids, past_key_values=session.prefill(), **options)
    assert torch.equal(got, want)
    assert engine.recoverer.recovery.stats.replays == 1


@pytest.mark.parametrize("family", WITHOUT)
def test_families_without_replay_say_why(lab: Any, family: str) -> None:
    engine, ids = replaying_engine(lab, family, snapshot_interval=32), lab.ids(200)
    lab.answer(engine, ids)
    reason = engine.recoverer.replayer.span(199).reason
    assert "every token before it has changed" in reason
    engine.manager.drop(Kind.RECURRENT)
    reused, logits = lab.answer(engine, ids)
    assert reused == 0
    assert torch.equal(logits, lab.cold(engine.model, ids))
    choice = engine.recoverer.recovery.to_json()["choices"][-1]
    assert choice["way"] == "recompute"


def test_a_canonical_request_computes(lab: Any) -> None:
    engine, ids = replaying_engine(lab, "gpt_oss"), lab.ids(LENGTHS[1])
    lab.answer(engine, ids)
    lose(engine)
    with engine.open(ids, floor=Grade.CANONICAL) as session:
        assert session.reused == 0
    assert engine.recoverer.recovery.stats.replays == 0


def test_bounded_replay_is_labelled_and_only_for_who_asks(lab: Any) -> None:
    engine, ids = replaying_engine(lab, "gemma3"), lab.ids(LENGTHS[0])
    lab.answer(engine, ids)
    state = before_it_is_lost(engine, ids)
    lose(engine)
    engine.recoverer.forced = Way.BOUNDED_REPLAY
    stats = engine.recoverer.recovery.stats
    with engine.open(ids) as session:  # faithful: not even offered
        assert (session.reused, stats.replays) == (0, 0)
    with engine.open(ids, floor=Grade.APPROXIMATE) as session:
        assert session.reused == LENGTHS[0] - 1
        assert stats.replayed_tokens == engine.recoverer.replayer.span(LENGTHS[0] - 1, exact=False).tokens
        assert session.grade is Grade.APPROXIMATE
        assert furthest(state_of(session), state) > 0.0
        lab.last(session, ids)
        forward_chunk(session.model, lab.ids(70, seed=4), session.cache, session.length)
        assert session.grade is Grade.APPROXIMATE, "what is computed from it inherits the grade"
        tokens = torch.from_numpy(session.sequence.tokens.copy()).unsqueeze(0)
    engine.recoverer.forced = Way.RECOMPUTE
    longer = torch.cat([tokens, lab.ids(1)], dim=1)
    with engine.open(longer, floor=Grade.APPROXIMATE) as session:
        assert session.reused == tokens.shape[1]
    with engine.open(longer) as session:
        assert session.reused == 0
        assert "its grade is below the floor" in str(session.explanation)
    engine.recoverer.forced = None
    with engine.open(ids) as session:  # an exact replay takes its place
        assert session.reused == LENGTHS[0] - 1
        assert session.grade is Grade.FAITHFUL
        assert furthest(state_of(session), state) == 0.0


def test_a_replay_that_raises_leaves_nothing_behind(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = replaying_engine(lab, "deepseek_v4"), lab.ids(LENGTHS[0])
    lab.answer(engine, ids)
    lose(engine)
    calls = []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward_chunk(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(replaying, "forward_chunk", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.open(ids)
    assert lab.held(engine) == 0
    engine.manager.check_integrity()
    assert not objects(engine, Kind.WINDOW, Kind.TAIL)
    with engine.open(ids) as session:
        assert session.reused == LENGTHS[0] - 1
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "deepseek_v4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_arena_of_accelerators_replays_the_same(
    lab: Any, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.adapters.transformers.engine.make_arena", TorchArena)
    engine, ids = replaying_engine(lab, family, dtype), lab.ids(LENGTHS[0])
    lab.answer(engine, ids)
    lose(engine)
    with engine.open(ids) as session:
        assert session.reused == LENGTHS[0] - 1
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))
    assert engine.recoverer.recovery.stats.replays == 1


def test_the_real_ratios_of_deepseek_v4(lab: Any) -> None:
    """Heavily compressed entries of 128 tokens: a tail of up to 127 rows comes back, and the overlap."""
    model = random_model(tiny_config("deepseek_v4", compress_rates=REAL_V4_RATIOS))
    with attach(model, device="32MiB", block_size=128, replay="auto") as engine:
        assert engine.spec.segment_tokens == 128
        ids = lab.ids(9 * 128 + 120)
        lab.answer(engine, ids)
        state = before_it_is_lost(engine, ids)
        lose(engine)
        with engine.open(ids) as session:
            assert session.reused == ids.shape[1] - 1
            assert engine.recoverer.recovery.stats.replayed_tokens < 400
            assert furthest(state_of(session), state) == 0.0
            assert torch.equal(lab.last(session, ids), lab.cold(model, ids, 128))


@pytest.mark.parametrize("family", ["cohere2", "gemma3n_text", "qwen2", "phi3"])
def test_families_of_other_configs(lab: Any, family: str) -> None:
    layers = ["full_attention", "sliding_attention"] * 2
    own: dict[str, Any] = {
        "cohere2": {"layer_types": layers},
        "qwen2": {"layer_types": layers, "use_sliding_window": True},
        "phi3": {},
        "gemma3n_text": {
            "layer_types": [*layers, *layers[::-1]],
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96] * 8,
            "activation_sparsity_pattern": [0.0] * 8,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    }[family]
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 40, "pad_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model = random_model(CONFIG_MAPPING[family](**{**sizes, **own}))
    with attach(model, device="16MiB", block_size=16, segment=32, replay="auto") as engine:
        ids = lab.ids(LENGTHS[0])
        lab.answer(engine, ids)
        state = before_it_is_lost(engine, ids)
        lose(engine)
        with engine.open(ids) as session:
            assert session.reused == LENGTHS[0] - 1
            assert 0 < engine.recoverer.recovery.stats.replayed_tokens < 300
            assert furthest(state_of(session), state) == 0.0
            assert torch.equal(lab.last(session, ids), lab.cold(model, ids))


def test_no_room_means_computing(lab: Any) -> None:
    """Windows have three slots left: too few for a replay and the request behind it."""
    engine, ids = replaying_engine(lab, "gpt_oss"), lab.ids(400)
    lab.answer(engine, ids)
    lose(engine)
    with squeezed(engine.manager, 1, 3), engine.open(ids) as session:
        assert session.reused == 0
        assert engine.manager.transfers.unkept > 0
        assert engine.recoverer.recovery.stats.replays == 0
    engine.manager.check_integrity()
    with engine.open(ids) as session:
        assert session.reused == 399


def test_bad_input_is_refused(lab: Any) -> None:
    with pytest.raises(ConfigError, match="use off or auto"):
        lab.engine("gpt_oss", replay="always")
    with pytest.raises(UnsupportedError, match="cannot be recorded"):
        lab.engine("gpt_oss", replay="auto", watch=lambda event: None)
    engine, ids = replaying_engine(lab, "gpt_oss"), lab.ids(LENGTHS[0])
    assert lab.engine("gpt_oss").recoverer is None
    lab.answer(engine, ids)
    lose(engine)
    replayer, tokens = engine.recoverer.replayer, ids[0].numpy().astype(np.int32)
    keys = (("kvloom.abi", engine._abi(engine.seen())),)
    from kvloom.adapters.transformers.recovering import NOTHING

    plan, made = engine.manager.colder.plan_replay(tokens[:-1], NOTHING, Grade.FAITHFUL, extra_keys=keys)
    with pytest.raises(InputError, match="needs a span"):
        replayer.run(tokens, plan, made, replayer.span(640))
    engine.model.train()
    with pytest.raises(UnsupportedError, match="training mode"):
        replayer.run(tokens, plan, made, replayer.span(plan.position))
    engine.model.eval()
    engine.manager.colder.finish_load(plan, np.zeros(len(plan), dtype=np.bool_))
    assert replayed_groups(engine.spec) == (1,)
