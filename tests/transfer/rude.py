"""A tier of which some methods do something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Published, Unit


class Rude:
    """Another tier, of which ``faults`` (by name of the method) are called instead."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.faults: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        fault = self.faults.get(name)
        return getattr(self._inner, name) if fault is None else lambda *a, **k: fault(self._inner, *a, **k)


def held_back(may: threading.Event) -> Callable[[Tier, Unit], Published]:
    """A ``publish`` that waits until it may."""

    def publish(inner: Tier, unit: Unit) -> Published:
        assert may.wait(60)
        return inner.publish(unit)

    return publish
