"""Cold forms behind an engine: fp8 is opt-in, labelled, and its label spreads; lossless is exact."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import COUNT, SHAPE, Shop  # noqa: E402

from kvloom.adapters.transformers import Engine, attach  # noqa: E402
from kvloom.engine.answers import Answer, answer  # noqa: E402
from kvloom.plan import Limit  # noqa: E402
from kvloom.transfer.options import ColdForm, TransferOptions  # noqa: E402
from kvloom.types import Grade, PayloadForm, Reason  # noqa: E402

FAMILIES = ("gpt_oss", "qwen3_next", "deepseek_v4", "deepseek_v32")


def engine_of(shop: Shop, family: str, form: ColdForm) -> Engine:
    return shop.engine(family, transfers=TransferOptions(cold_form=form))


def ask(shop: Shop, engine: Engine, ids: list[int], floor: Grade) -> tuple[int, Grade | None, Answer, list[Limit]]:
    with engine.open(ids, floor=floor) as session:
        found = session.explanation
        got = answer(session, count=COUNT, started=time.perf_counter())
        if found.grade is not None:
            assert session.grade <= found.grade
    engine.cold.flush()
    engine.manager.check_integrity()
    return found.boundary, found.grade, got, list(found.limits)


def forms_on_disk(engine: Engine) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for batch in engine.cold.tiers[0].catalogue():
        for entry in batch.places.entries:
            found.setdefault(engine.spec.groups[int(entry["group"])].name, set()).add(int(entry["form"]))
            assert (entry["grade"] == Grade.APPROXIMATE) == (entry["form"] == PayloadForm.FP8)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_is_a_miss_for_who_asks_for_better_and_its_grade_spreads(shop: Shop, family: str) -> None:
    ids = shop.ids()
    with engine_of(shop, family, ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
        forms = forms_on_disk(engine)
        for group in engine.spec.groups:
            expected = {PayloadForm.RAW, PayloadForm.LOSSLESS} if group.is_snapshot else {PayloadForm.FP8}
            assert forms[group.name] <= expected, "snapshots are never quantised, everything else is"
    with engine_of(shop, family, ColdForm.FP8) as engine:
        with engine.open(ids, floor=Grade.FAITHFUL) as session:  # nothing is computed, so nothing is kept
            found = session.explanation
        assert (found.boundary, found.grade) == (0, None)
        limits = [limit for limit in found.limits if limit.tier == "disk"]
        assert {limit.reason for limit in limits} == {Reason.GRADE}
    size = shop.size()
    with engine_of(shop, family, ColdForm.FP8) as engine:
        boundary, grade, got, _ = ask(shop, engine, ids, Grade.APPROXIMATE)
        assert boundary == len(ids) - 1
        assert grade is Grade.APPROXIMATE
        cold = shop.cold(engine, ids)
        assert torch.isfinite(got.first_logits).all()
        assert not torch.equal(got.first_logits, cold.first_logits), "it is called approximate for a reason"
        with engine.open(ids, floor=Grade.APPROXIMATE) as session:
            child = session.fork([*ids, 5, 6, 7])
            child.prefill()
            assert child.grade is Grade.APPROXIMATE
            child.close()
        longer = [*ids, *got.tokens[:-1], 7, 8, 9]
        boundary, grade, _, _ = ask(shop, engine, longer, Grade.APPROXIMATE)
        assert grade is Grade.APPROXIMATE
        assert boundary == len(longer) - 3
    assert shop.size() > size
    with engine_of(shop, family, ColdForm.FP8) as engine:
        _, grade, _, _ = ask(shop, engine, longer, Grade.APPROXIMATE)
        assert grade is Grade.APPROXIMATE, "after a restart, too"
        boundary, grade, got, _ = ask(shop, engine, longer, Grade.FAITHFUL)
        assert boundary == 0, "nothing that came of it is served to who asks for better"
        assert got.same_as(shop.cold(engine, longer)), "computed, not restored"


@pytest.mark.parametrize("family", FAMILIES)
def test_who_wants_exact_state_has_it_kept_so(shop: Shop, family: str) -> None:
    """fp8 is for sessions that reuse it: a faithful one finds its own state again, in an engine that may write fp8."""
    ids = shop.ids()
    with engine_of(shop, family, ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.FAITHFUL)
        assert PayloadForm.FP8 not in set().union(*forms_on_disk(engine).values())
    with engine_of(shop, family, ColdForm.FP8) as engine:
        boundary, grade, got, _ = ask(shop, engine, ids, Grade.FAITHFUL)
        assert (boundary, grade) == (len(ids) - 1, Grade.FAITHFUL)
        assert got.same_as(shop.cold(engine, ids))
        assert all(choice.form is not PayloadForm.FP8 for choice in engine.cold.links[0].forms.table())


def test_exact_state_takes_the_place_of_fp8(shop: Shop) -> None:
    ids = shop.ids()
    with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
        assert PayloadForm.FP8 in set().union(*forms_on_disk(engine).values())
    for boundary in (0, len(ids) - 1):
        with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
            assert ask(shop, engine, ids, Grade.FAITHFUL)[0] == boundary
            assert PayloadForm.FP8 not in set().union(*forms_on_disk(engine).values())


@pytest.mark.parametrize("form", [ColdForm.NONE, ColdForm.LOSSLESS, ColdForm.FP8])
def test_bytes_that_are_counted_are_those_that_moved(shop: Shop, form: ColdForm) -> None:
    ids = shop.ids()
    with engine_of(shop, "gpt_oss", form) as engine:
        engine.cold.links[0].forms.read.note(1 << 30, 1000.0)  # so slow a disk that every byte counts
        engine.cold.links[0].forms.write.note(1 << 30, 1000.0)
        ask(shop, engine, ids, Grade.APPROXIMATE)
        store, stats = engine.cold.tiers[0], engine.cold.stats
        contents = store.contents()
        assert sum(stats.bytes_stored.values()) == contents.payload_published
        slots = sum(
            int(engine.spec.groups[entry["group"]].slot_bytes) for b in store.catalogue() for entry in b.places.entries
        )
        assert (contents.payload < slots) is (form is not ColdForm.NONE)
    with engine_of(shop, "gpt_oss", form) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
        loaded = sum(engine.cold.stats.bytes_loaded.values())
        assert 0 < loaded <= contents.payload
        assert loaded > contents.payload / 2


def test_the_same_work_in_fp8_writes_nothing_again(shop: Shop) -> None:
    ids = shop.ids()
    with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
    size = shop.size()
    for _ in range(2):
        with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
            engine.manager.clear()
            ask(shop, engine, ids, Grade.APPROXIMATE)
    with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
    assert shop.size() - size < size / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_lossless_is_exact(shop: Shop, family: str) -> None:
    """Whatever form was taken: a canonical hit of another process, which is not told of any form, is bit-equal."""
    ids = shop.ids()
    with engine_of(shop, family, ColdForm.LOSSLESS) as engine:
        engine.cold.links[0].forms.read.note(1 << 30, 1000.0)  # so slow a disk that every byte counts
        engine.cold.links[0].forms.write.note(1 << 30, 1000.0)
        ask(shop, engine, ids, Grade.FAITHFUL)
        forms = forms_on_disk(engine)
        assert any(PayloadForm.LOSSLESS in found for found in forms.values())
        assert [str(choice) for choice in engine.cold.links[0].forms.table()]
    with engine_of(shop, family, ColdForm.NONE) as engine:
        boundary, grade, got, _ = ask(shop, engine, ids, Grade.CANONICAL)
        assert (boundary, grade) == (6 * 32, Grade.CANONICAL)
        assert got.same_as(shop.cold(engine, ids))


def test_d5_a_payload_that_is_not_of_its_form_is_computed_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is right: only the decoder can tell."""
    from kvloom.transfer import forms as module

    encode = module.encode

    def spoiled(*arguments: object) -> object:
        made = encode(*arguments)  # type: ignore[arg-type]
        if made is not None and arguments[0] is not PayloadForm.RAW:
            made = made.copy()
            made[: min(40, len(made))] = np.random.default_rng(0).integers(0, 255, min(40, len(made)))
        return made

    ids = shop.ids()
    monkeypatch.setattr(module, "encode", spoiled)
    with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
    with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
        boundary, _, got, _ = ask(shop, engine, ids, Grade.APPROXIMATE)
        assert boundary == 0
        assert got.same_as(shop.cold(engine, ids))
        assert engine.cold.stats.failed["integrity"] > 0


def fill_host(shop: Shop, engine: Engine, count: int, floor: Grade = Grade.FAITHFUL) -> list[list[int]]:
    prompts = [shop.ids(seed=seed) for seed in range(count)]
    for ids in prompts:
        ask(shop, engine, ids, floor)
    return prompts


def test_nothing_goes_to_fp8_in_host_memory_before_somebody_accepts_it(shop: Shop) -> None:
    options = TransferOptions(cold_form=ColdForm.FP8, cold_below=100.0, gpu_watermark=0.01, host_mark=0.2)
    with attach(shop.lab.model("gpt_oss"), **SHAPE, host="2MiB", transfers=options) as engine:
        prompts = fill_host(shop, engine, 3)
        (cooling,) = engine.cold.cooling
        assert PayloadForm.FP8 not in cooling.converted
        engine.manager.evict(engine.manager.cap)
        boundary, grade, _, _ = ask(shop, engine, prompts[1], Grade.FAITHFUL)
        assert (boundary, grade) == (len(prompts[1]) - 1, Grade.FAITHFUL)


@pytest.mark.parametrize("form", [ColdForm.FP8, ColdForm.LOSSLESS])
def test_what_is_used_rarely_in_host_memory_goes_cold(shop: Shop, form: ColdForm) -> None:
    options = TransferOptions(cold_form=form, cold_below=0.5, gpu_watermark=0.01, host_mark=0.6)
    with attach(shop.lab.model("gpt_oss"), **SHAPE, host="2MiB", transfers=options) as engine:
        prompts = fill_host(shop, engine, 4)
        if form is ColdForm.FP8:  # somebody else, who accepts it
            ask(shop, engine, shop.ids(seed=99), Grade.APPROXIMATE)
        for _ in range(12):  # used often
            engine.manager.evict(engine.manager.cap)
            ask(shop, engine, prompts[0], Grade.FAITHFUL)
        prompts += [shop.ids(seed=seed) for seed in range(4, 9)]
        for ids in prompts[4:]:
            ask(shop, engine, ids, Grade.FAITHFUL)
        (cooling,) = engine.cold.cooling
        assert cooling.saved > 0
        if form is ColdForm.FP8:
            assert cooling.converted[PayloadForm.FP8] > 0
        host = engine.cold.tiers[0]
        host.check_integrity()
        engine.manager.evict(engine.manager.cap)
        boundary, grade, got, _ = ask(shop, engine, prompts[0], Grade.FAITHFUL)
        assert (boundary, grade) == (len(prompts[0]) - 1, Grade.FAITHFUL), "what is used often stays as it was"
        assert got.same_as(shop.cold(engine, prompts[0]))
        seen: list[tuple[int, Grade | None]] = []
        for ids in prompts[1:]:
            engine.manager.evict(engine.manager.cap)
            boundary, grade, got, _ = ask(shop, engine, ids, Grade.FAITHFUL)
            assert got.same_as(shop.cold(engine, ids))
            seen.append((boundary, grade))
        if form is ColdForm.LOSSLESS:
            assert {boundary for boundary, _ in seen} <= {0, len(prompts[0]) - 1}
            assert max(boundary for boundary, _ in seen) > 0
        else:
            assert min(boundary for boundary, _ in seen) == 0
        engine.cold.flush()
        host.check_integrity()


def test_an_approximate_request_uses_what_went_cold(shop: Shop) -> None:
    options = TransferOptions(cold_form=ColdForm.FP8, cold_below=100.0, gpu_watermark=0.01, host_mark=0.2)
    with attach(shop.lab.model("gpt_oss"), **SHAPE, host="2MiB", transfers=options) as engine:
        prompts = fill_host(shop, engine, 3, Grade.APPROXIMATE)
        engine.manager.evict(engine.manager.cap)
        boundary, grade, _, limits = ask(shop, engine, prompts[1], Grade.FAITHFUL)
        assert boundary == 0
        assert (Reason.GRADE, "host") in {(limit.reason, limit.tier) for limit in limits}
    with attach(shop.lab.model("gpt_oss"), **SHAPE, host="2MiB", transfers=options) as engine:
        prompts = fill_host(shop, engine, 3, Grade.APPROXIMATE)
        engine.manager.evict(engine.manager.cap)
        boundary, grade, _, _ = ask(shop, engine, prompts[1], Grade.APPROXIMATE)
        assert (boundary, grade) == (len(prompts[1]) - 1, Grade.APPROXIMATE)


def test_the_planner_says_so_too(shop: Shop) -> None:
    ids = shop.ids()
    with engine_of(shop, "gpt_oss", ColdForm.FP8) as engine:
        ask(shop, engine, ids, Grade.APPROXIMATE)
    with shop.engine("gpt_oss", transfers=TransferOptions(cold_form=ColdForm.FP8), replay="auto") as engine:
        with engine.open(ids, floor=Grade.FAITHFUL) as session:
            found = session.explanation
        assert found.boundary == 0
        assert (Reason.GRADE, "disk") in {(limit.reason, limit.tier) for limit in found.limits}
    with shop.engine("gpt_oss", replay="auto") as engine:
        assert ask(shop, engine, ids, Grade.APPROXIMATE)[:2] == (len(ids) - 1, Grade.APPROXIMATE)
