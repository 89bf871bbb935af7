"""``verify-model`` with a store: what comes back from disk is compared with cold runs, and the comparison can fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.tiers.disk.faults import FailingOps  # noqa: E402

from kvloom.errors import StoreError  # noqa: E402
from kvloom.manager.colder import ColderTiers  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.tiers.disk import DiskStore, NewObject, Result  # noqa: E402
from kvloom.transfer.bringer import Bringer  # noqa: E402
from kvloom.transfer.hierarchy import Hierarchy  # noqa: E402
from kvloom.transfer.offers import Offer  # noqa: E402
from kvloom.transfer.units import UnitMaker  # noqa: E402
from kvloom.verification.report import Omission, Report, Verdict  # noqa: E402
from kvloom.verification.verify import verify_model  # noqa: E402

SEGMENT = 32
MIB = 1 << 20


def verified(family: str, store: Callable[[], DiskStore], tokens: int = 110) -> Report:
    model = random_model(tiny_config(family), 0, "float32")
    return verify_model(model, tokens=tokens, segment=SEGMENT, block_size=SEGMENT, store=store)


@pytest.fixture
def store(tmp_path: Path) -> Callable[[], DiskStore]:
    return partial(DiskStore.open, tmp_path / "store", 64 * MIB)


def from_disk(report: Report) -> list[Any]:
    return [b for b in report.boundaries if b.scenario == "disk"]


def test_two_runs(store: Callable[[], DiskStore]) -> None:
    first, second = verified("deepseek_v4", store), verified("deepseek_v4", store)
    for report in (first, second):
        assert report.verdict is Verdict.EXACT, report.to_text()
        assert all(b.passed and b.bitwise for b in report.boundaries)
        for name, result in [*report.kinds.items(), *report.groups.items()]:
            assert result.bytes_restored["disk"] > 0, name
            assert result.bytes_restored["device"] > 0, name
            assert result.omission is Omission.DETECTED, name  # the store did not bring back what was left out
    assert first.store is not None
    assert second.store is not None
    kinds = {kind.name.lower() for kind in first.kinds}
    assert (first.store.found, set(first.store.stored)) == ({}, kinds)
    assert (set(second.store.found), second.store.stored) == (kinds, {})
    assert all(second.store.found.values())
    assert [b.position for b in from_disk(first)][:3] == [0, 32, 64]  # as each prompt leaves its boundary
    assert [b.position for b in from_disk(second)][:3] == [32, 64, 96]
    later = [b.position for b in from_disk(second)][3:]
    assert later == [32, 64, 96, 97, 49, 63, 104, 96]
    assert later == [b.position for b in from_disk(first)][3:]


def test_damaged_objects_are_not_used(tmp_path: Path, store: Callable[[], DiskStore]) -> None:
    assert verified("gpt_oss", store).verdict is Verdict.EXACT
    for extent in (tmp_path / "store" / "extents").iterdir():
        data = np.fromfile(extent, np.uint8)
        data[20_000::4096] ^= 1
        data.tofile(extent)
    report = verified("gpt_oss", store)
    assert report.verdict is Verdict.EXACT, report.to_text()
    assert report.store is not None
    assert report.store.failed["integrity"] > 0
    assert "objects did not arrive: integrity" in report.to_text()


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    ops = FailingOps()
    opened = DiskStore.open(tmp_path / "store", 64 * MIB, ops=ops)
    ops.failing["write"] = errno.ENOSPC
    with pytest.raises(StoreError, match=r"did not take everything \(unavailable .*No space left on device"):
        verified("gpt_oss", lambda: opened)


# -------------------------------------------------------------------- planted faults


def differs(family: str, store: Callable[[], DiskStore]) -> dict[str, Any]:
    report = verified(family, store)
    assert report.verdict is Verdict.DIFFERS, report.to_text()
    found = report.to_json()["first_difference"]
    assert found["scenario"] == "disk"
    return dict(found)


def test_a_bit_that_was_wrong_when_it_was_stored(
    store: Callable[[], DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right: only the comparison with a cold run can tell."""
    make_unit = UnitMaker.make

    def flipped(self: UnitMaker, *arguments: Any, **options: Any) -> Any:
        unit = make_unit(self, *arguments, **options)
        names = [group.name for group in self.spec.groups]

        def spoiled(item: NewObject) -> NewObject:
            def write(into: memoryview) -> None:
                item.payload.write(into)
                if names[item.group] == "window.40":
                    into[1] ^= 1

            return replace(item, payload=replace(item.payload, write=write))

        return replace(unit, objects=tuple(map(spoiled, unit.objects)))

    monkeypatch.setattr(UnitMaker, "make", flipped)
    found = differs("gpt_oss", store)
    assert (found["kind"], found["group"], found["what"], found["size"]) == ("window", "window.40", "bytes", 1)


def test_objects_that_were_read_into_each_others_slots(
    store: Callable[[], DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_plan = Offer.of_plan

    def swapped(self: Offer, plan: Any) -> Any:
        tiers, index = of_plan(self, plan)
        blocks = np.flatnonzero(plan.group == 0)
        index[blocks] = index[blocks[::-1]]
        return tiers, index

    monkeypatch.setattr(Offer, "of_plan", swapped)
    found = differs("llama", store)
    assert (found["kind"], found["what"], found["position"]) == ("compressed", "bytes", 0)


def test_state_that_is_found_and_not_read(store: Callable[[], DiskStore], monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(_self: Bringer, places: Any, *_: Any) -> Any:
        return np.full(len(places), Result.OK, np.uint8)

    monkeypatch.setattr(Bringer, "read", unread)
    found = differs("lfm3", store)
    assert found["what"] == "bytes"


def test_a_store_that_is_never_asked(store: Callable[[], DiskStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hierarchy, "restore", lambda *_: None)
    found = differs("gpt_oss", store)
    assert (found["boundary"], found["what"], found["tensor"]) == (SEGMENT, "hit", "hit ends at 0")


def test_a_kind_that_never_comes_from_disk(store: Callable[[], DiskStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of a boundary are stored, and nobody looks at them."""
    plan_load = ColderTiers.plan_load

    def without(self: ColderTiers, tokens: Any, stored: Any, **names: Any) -> Any:
        keep = stored.group == [g.name for g in self._books.spec.groups].index("full")
        rest = type(stored)(*(getattr(stored, name)[keep] for name in ("row", "group", "column", "grade")))
        return plan_load(self, tokens, rest, **names)

    monkeypatch.setattr(ColderTiers, "plan_load", without)
    found = differs("gpt_oss", store)
    assert (found["what"], found["tensor"]) == ("hit", "hit ends at 0")
