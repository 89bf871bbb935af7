"""The oracle can fail: each planted fault makes ``verify-model`` say ``differs``, with the right kind and position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.adapters.transformers import attaching as attaching_module  # noqa: E402
from kvloom.core.fields import SLOT_BASE  # noqa: E402
from kvloom.plan import CopyPlan  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.verification.bench import Bench, random_tokens  # noqa: E402
from kvloom.verification.report import Omission, Report, Verdict  # noqa: E402
from kvloom.verification.verify import verify_model  # noqa: E402

SEGMENT = 32
TOKENS = 140
LATER = 2 * SEGMENT
"""Where a fault of one object is planted: block 1 covers [32, 64), a snapshot is the one at 64."""


def differs(family: str, tamper: Callable[[Any], None] | None, dtype: str = "float32") -> Report:
    model = random_model(tiny_config(family), 0, dtype)
    report = verify_model(model, tokens=TOKENS, segment=SEGMENT, block_size=SEGMENT, tamper=tamper)
    assert report.verdict is Verdict.DIFFERS, report.to_text()
    assert report.exit_code == 1
    return report


def first(report: Report) -> dict[str, Any]:
    found = report.to_json()["first_difference"]
    assert found is not None
    assert str(found["position"]) in report.reason
    return dict(found)


def group_index(engine: Any, name: str) -> int:
    return [g.name for g in engine.spec.groups].index(name)


def slot_bytes(engine: Any, group: int, slot: int) -> Any:
    at = engine.manager.geometry.slot_offset(group, slot)
    return engine.arena.bytes[at : at + engine.spec.groups[group].slot_bytes]


def cached_slots(engine: Any, name: str) -> list[int]:
    """The slots that a hit at ``LATER`` reuses, block by block; of a snapshot group the snapshot's slot."""
    prompt = random_tokens(engine.model, TOKENS, torch.Generator().manual_seed(0))[0]
    group = group_index(engine, name)
    plans: list[CopyPlan] = []
    run = engine.arena.run
    engine.arena.run = lambda plan: (plans.append(plan), run(plan))
    session = engine.open(prompt[: LATER + 1])
    engine.arena.run = run
    assert session.reused == LATER
    if engine.spec.groups[group].is_snapshot:
        slots = [int(s) for plan in plans for g, s in zip(plan.group, plan.src, strict=True) if g == group and s >= 0]
    else:
        sequence = session.sequence
        table = sequence.block_table(group)
        slots = [int(table[i % len(table)]) for i in range(sequence.first_block(group), sequence.num_blocks(group))]
    session.sequence.close()
    return slots


def flip(engine: Any, name: str, *, layer: int, tensor: int, element: int, which: int) -> None:
    """Flip the lowest bit of one element of one cached tensor."""
    group = group_index(engine, name)
    spec = engine.spec.groups[group]
    at = spec.layers.index(layer) * spec.layer_stride + spec.tensor_offsets[tensor]
    size = {"float32": 4, "bfloat16": 2}[spec.tensors[tensor].dtype]
    slot_bytes(engine, group, cached_slots(engine, name)[which])[at + element * size] ^= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "group", "layer", "tensor", "element", "kind", "position"),
    [
        # Block 1 holds tokens 32 to 63; 16 numbers per row, rows of one head first.
        ("gpt_oss", "full", 3, 1, 5 * 16, "compressed", 37),
        ("gpt_oss", "window.40", 2, 0, 32 * 16 + 20 * 16 + 3, "window", 52),
        ("deepseek_v32", "indexer", 1, 0, 31 * 16 + 15, "indexer", 63),
        ("deepseek_v4", "csa", 3, 0, 2 * 16, "compressed", 40),
        ("deepseek_v4", "csa.indexer", 1, 0, 7 * 16, "indexer", 60),
        ("deepseek_v4", "tail.overlap", 1, 0, 0, "tail", LATER),
        ("qwen3_next", "recurrent", 0, 1, 100, "recurrent", LATER),
        ("lfm3", "recurrent", 2, 0, 3, "recurrent", LATER),
    ],
)
def test_one_flipped_bit(
    family: str, group: str, layer: int, tensor: int, element: int, kind: str, position: int, dtype: str
) -> None:
    def tamper(engine: Any) -> None:
        flip(engine, group, layer=layer, tensor=tensor, element=element, which=-1)

    found = first(differs(family, tamper, dtype))
    assert (found["kind"], found["group"], found["layer"], found["position"]) == (kind, group, layer, position)
    assert (found["what"], found["size"], found["boundary"]) == ("bytes", 1, LATER)


@pytest.mark.parametrize(
    ("family", "group", "kind"), [("llama", "full", "compressed"), ("deepseek_v4", "hca", "compressed")]
)
def test_two_swapped_slots(family: str, group: str, kind: str) -> None:
    def tamper(engine: Any) -> None:
        one, two = (slot_bytes(engine, group_index(engine, group), s) for s in cached_slots(engine, group)[:2])
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)

    found = first(differs(family, tamper))
    assert (found["kind"], found["group"], found["position"], found["boundary"]) == (kind, group, 0, SEGMENT)
    assert found["what"] == "bytes"


def test_transposed_strides() -> None:
    def tamper(engine: Any) -> None:
        opened = engine.open

        def transposed(*args: Any, **kwargs: Any) -> Any:
            session = opened(*args, **kwargs)
            states = session.cache.layers[2].recurrent_states
            states[0] = states[0].transpose(2, 3).contiguous().transpose(2, 3)
            return session

        engine.open = transposed

    found = first(differs("qwen3_next", tamper))
    assert (found["kind"], found["layer"], found["tensor"]) == ("recurrent", 2, "recurrent_states.0")
    assert (found["what"], found["boundary"], found["position"]) == ("strides", SEGMENT, SEGMENT)


@pytest.mark.parametrize(
    ("family", "group", "kind"), [("gpt_oss", "window.40", "window"), ("deepseek_v4", "csa", "compressed")]
)
def test_stale_generation(family: str, group: str, kind: str) -> None:
    def tamper(engine: Any) -> None:
        opened = engine.open

        def reused_meanwhile(*args: Any, **kwargs: Any) -> Any:
            session = opened(*args, **kwargs)
            if session.reused == LATER:
                index = group_index(engine, group)
                slot = session.sequence.block_table(index)[session.sequence.first_block(index)]
                arrays = engine.manager.arrays
                arrays.generation[arrays.group[index, SLOT_BASE] + slot] += 1
            return session

        engine.open = reused_meanwhile

    found = first(differs(family, tamper))
    assert (found["kind"], found["group"], found["what"]) == (kind, group, "stale")
    assert (found["boundary"], found["position"]) == (LATER, LATER)


def test_an_overlap_that_is_not_restored() -> None:
    def tamper(engine: Any) -> None:
        run, overlap = engine.arena.run, group_index(engine, "tail.overlap")

        def without_overlap(plan: CopyPlan) -> None:
            keep = np.flatnonzero(plan.group != overlap)
            run(
                replace(
                    plan, group=plan.group[keep], src=plan.src[keep], dst=plan.dst[keep], entries=plan.entries[keep]
                )
            )

        engine.arena.run = without_overlap

    found = first(differs("deepseek_v4", tamper))
    assert (found["kind"], found["group"], found["boundary"]) == ("tail", "tail.overlap", SEGMENT)


def test_an_overlap_that_is_thought_to_be_needless_at_aligned_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = attaching_module.probe

    def forgetful(model: Any, spec: Any) -> Any:
        spec = probe(model, spec)
        groups = [replace(g, needed_unless_multiple_of=4) if g.name == "tail.overlap" else g for g in spec.groups]
        return replace(spec, groups=tuple(groups))

    monkeypatch.setattr(attaching_module, "probe", forgetful)
    found = first(differs("deepseek_v4", None))
    assert (found["kind"], found["group"], found["boundary"]) == ("tail", "tail.overlap", SEGMENT)


def test_a_kind_that_nobody_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that cannot leave a kind out proves nothing by finding it there."""

    def keep_all(engine: Any) -> None:
        engine.manager.drop = lambda *_args, **_kwargs: 1

    report = differs("gpt_oss", keep_all)
    assert report.first_failure is None
    assert {r.omission for r in report.kinds.values()} == {Omission.HARMLESS}
    assert "left out: harmless" in report.reason


def test_a_kind_that_was_never_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "count_restored", lambda self, position: None)
    report = differs("mistral", None)
    assert "never restored" in report.reason


def test_a_hit_that_ends_early() -> None:
    def tamper(engine: Any) -> None:
        engine.manager.drop("window.40", position=SEGMENT)

    found = first(differs("gpt_oss", tamper))
    assert (found["what"], found["kind"], found["group"]) == ("hit", "window", "window.40")
    assert found["boundary"] == LATER


def test_lost_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """State can be right and the answer wrong: the logits are compared as well."""
    run = Bench.run

    def slightly_off(self: Bench, session: Any, ids: Any) -> Any:
        logits = run(self, session, ids)
        if session.reused == LATER:
            logits[7] = torch.nextafter(logits[7], torch.tensor(float("inf")))
        return logits

    monkeypatch.setattr(Bench, "run", slightly_off)
    found = first(differs("llama", None))
    assert (found["what"], found["size"], found["boundary"], found["kind"]) == ("logits", 1, LATER, None)
