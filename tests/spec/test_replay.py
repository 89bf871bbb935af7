"""How far back a replay begins, compared with a simulation that carries exactness forward, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.spec.presets import load_preset
from kvloom.spec.replay import needed_from, replay_span, replayed_groups
from kvloom.types import Kind

KEYS = TensorSpec("keys", (1, 4), "float32", entry_axis=1)
STATE = TensorSpec("state", (4,), "float32")


def model(layers: list[tuple[str, int]], block: int = 4) -> ModelSpec:
    """Layers as ("full" | "window" | "chunk", size)."""
    groups = []
    for name, size in sorted(set(layers)):
        mine = tuple(i for i, layer in enumerate(layers) if layer == (name, size))
        if name == "full":
            groups.append(GroupSpec("full", Kind.COMPRESSED, mine, (KEYS,), block_tokens=block))
        else:
            chunked = name == "chunk"
            groups.append(
                GroupSpec(f"{name}.{size}", Kind.WINDOW, mine, (KEYS,), 1, block, window=size, chunked=chunked)
            )
    return ModelSpec("hand-made", tuple(groups), block, 2 * block)


def exact_after(spec: ModelSpec, layers: list[tuple[str, int]], start: int, position: int) -> list[list[bool]]:
    """For every layer whether its input at every position is exact when the run begins at ``start``."""
    inputs = [[p >= start for p in range(position)]]
    for name, size in layers:
        before = inputs[-1]
        after = []
        for p in range(position):
            first = 0
            if name == "window":
                first = max(0, p - size + 1)
            elif name == "chunk":
                first = p // size * size
            reads = [] if name == "full" else range(first, p + 1)
            after.append(before[p] and all(before[r] for r in reads))
        inputs.append(after)
    return inputs


LAYERS = st.lists(
    st.tuples(st.sampled_from(["full", "window", "chunk"]), st.sampled_from([3, 6, 8])).map(
        lambda layer: ("full", 0) if layer[0] == "full" else layer
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(layers=LAYERS, position=st.integers(1, 90))
def test_every_row_that_is_kept_is_exact_and_no_token_too_many_is_run(
    layers: list[tuple[str, int]], position: int
) -> None:
    spec = model(layers)
    span = replay_span(spec, position)
    wanted = [(layer, g) for g in replayed_groups(spec) for layer in spec.groups[g].layers]

    def whole(start: int) -> bool:
        inputs = exact_after(spec, layers, start, position)
        return all(all(inputs[layer][needed_from(spec.groups[g], position) :]) for layer, g in wanted)

    if span:
        assert 0 < span.start < position
        assert span.start % spec.lcm_tokens == 0
        assert whole(span.start)
        assert not whole(span.start + spec.lcm_tokens)
        assert span.tokens == position - span.start
    else:
        nothing = not any(needed_from(spec.groups[g], position) < position for _, g in wanted)
        assert nothing or not whole(spec.lcm_tokens), span.reason


def test_the_window_is_needed_in_whole_blocks() -> None:
    group = model([("window", 6)]).groups[0]
    assert [needed_from(group, p) for p in (1, 6, 9, 10, 13)] == [0, 0, 4, 4, 8]
    chunk = model([("chunk", 6)]).groups[0]
    assert [needed_from(chunk, p) for p in (5, 6, 7, 12, 18)] == [0, 4, 4, 12, 16]


def test_only_what_is_lost_is_made() -> None:
    spec = model([("window", 8), ("full", 0), ("window", 3), ("full", 0)])
    names = [group.name for group in spec.groups]
    early, late = names.index("window.8"), names.index("window.3")
    assert replay_span(spec, 64, (early,)).start == 56
    assert replay_span(spec, 64, (late,)).start == 52
    assert replay_span(spec, 64).start == 52
    assert replay_span(spec, 64, exact=False).start == 56
    assert replay_span(spec, 64, skip=52).reason != ""


def test_refusals_say_why() -> None:
    full = model([("full", 0)])
    assert "no windows" in replay_span(full, 64).reason
    spec = model([("window", 8), ("full", 0)])
    assert "itself is lost" in replay_span(spec, 64, tuple(range(len(spec.groups)))).reason
    assert "no later than" in replay_span(spec, 8).reason
    recurrent = GroupSpec("state", Kind.RECURRENT, (2,), (STATE,))
    mixed = ModelSpec("mixed", (*spec.groups, recurrent), 4, 8)
    assert "state that every token before it has changed" in replay_span(mixed, 64).reason
    chunks = model([("chunk", 8), ("full", 0)])
    assert "nothing is missing" in replay_span(chunks, 64).reason


@pytest.mark.parametrize(("preset", "tokens"), [("deepseek-v4-flash", 5504), ("deepseek-v4-pro", 7808)])
def test_deepseek_v4_stacks_every_window(preset: str, tokens: int) -> None:
    """At most what the model's report says, window times layers; a window's own token needs no replay."""
    spec = load_preset(preset)
    span = replay_span(spec, 65536)
    layers = tokens // 128
    assert layers * 127 <= span.tokens <= tokens
    bounded = replay_span(spec, 65536, exact=False)
    assert bounded.tokens == 128
