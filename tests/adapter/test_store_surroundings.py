"""What surrounds a store: kinds that nobody knows, strings of users, and the wall clock (C4, D14, D15)."""

from __future__ import annotations

import itertools
import os
import re
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import Shop  # noqa: E402
from tests.adapter.test_store import KINDS, kinds_of  # noqa: E402

from kvloom.adapters.transformers import attach  # noqa: E402
from kvloom.errors import SpecError  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.types import Kind  # noqa: E402

OURS = re.compile(r"KVLOOM|lock|index-[0-9a-f]{16}\.sqlite(-wal|-shm)?|extents|[0-9a-f]{16}\.extent")
"""What files and folders of a store are called."""
ODD = ("../../../../etc/passwd", "a\0b", "x" * 5000, "/", "con", "~root", "\u202egnp", "$(id)", "%2e%2e")


def test_c4_every_kind_of_state_was_moved(shop: Shop) -> None:
    """The families that test_store.py sends to disk and back have every kind of state; a new kind fails here."""
    found: set[str] = set()
    for family in KINDS:
        with shop.engine(family) as engine:
            found |= kinds_of(engine)
    assert found == {kind.name.lower() for kind in Kind} - {"disk_prefix"}, "and that one is what a store holds"


def test_c4_state_of_no_known_kind_is_an_error_at_the_start(shop: Shop) -> None:
    model = random_model(tiny_config("gpt_oss"))
    model.config = tiny_config("gpt_oss")
    model.config.layer_types = ["sliding_attention", "mystery_attention"] * 2
    store = shop.store()
    with pytest.raises(SpecError, match="mystery_attention"):
        attach(model, device="4MiB", store=store)
    store.close()
    assert shop.size() == 0, "and nothing was written"


@pytest.mark.parametrize("odd", ODD)
def test_d14_strings_of_users_name_no_files(shop: Shop, odd: str) -> None:
    ids = shop.ids(100)
    about: dict[str, Any] = {"salt": odd.encode(), "extra_keys": (("lora", odd), (odd, "image"))}
    assert shop.once("gpt_oss", ids, **about) == 0
    assert shop.once("gpt_oss", ids, **about) == 99
    names = [path.relative_to(shop.place) for path in shop.place.rglob("*")]
    assert names
    for name in names:
        assert all(OURS.fullmatch(part) for part in name.parts), name
    assert list(shop.place.parent.iterdir()) == [shop.place], "nothing beside it either"


YEARS = 20 * 365 * 86400


@pytest.mark.parametrize("shift", [YEARS, -YEARS])
def test_d15_nothing_lives_by_the_wall_clock(shop: Shop, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by years between two calls, and files are from the past and the future."""
    ids, really, jumps = shop.ids(100), time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: really() + next(jumps) % 3 * shift)
    monkeypatch.setattr(time, "time_ns", lambda: int((really() + next(jumps) % 3 * shift) * 1e9))
    assert shop.once("gpt_oss", ids) == 0
    for number, path in enumerate(sorted(shop.place.rglob("*"))):
        os.utime(path, (really() + number % 3 * shift,) * 2)
    with shop.engine("gpt_oss", host="4MiB") as engine:
        assert shop.ask(engine, ids)[0] == 99, "from disk"
        engine.manager.clear()
        assert shop.ask(engine, ids)[0] == 99, "from host memory"
        tiers = engine.cold.stats.tiers.values()
        assert all(0 <= tier.load_seconds < 60 for tier in tiers), "durations are of another clock"
        store = engine.cold.tiers[-1]
        assert store.verify().ok
        assert store.gc().units == 0, "nothing has expired"
