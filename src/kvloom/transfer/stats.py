"""What moved between the device and its cold tiers, and what did not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TierStats:
    """Of one tier.

    Attributes:
        bytes_loaded, bytes_stored: payload as it lies in the tier, by kind: what was read and arrived, and what was
            brought there; headers and padding are not in it.
        objects_loaded: by group.
        loads, stores: prefix units that moved.
        demoted: units that came from the tier before it.
        load_seconds: that its lane spent reading at the tier's own speed, and ``paced_seconds`` on pieces between which
            it rested because a forward computed (``pace.py``).
        failed: objects that were looked up and did not arrive, by reason.
        not_stored: units that the tier did not take, by reason.
        unanswered: questions (what it has, that something was used) that it did not answer in time.
        raised: by lane (read, write, ask): what its code raised, by type.
    """

    bytes_loaded: Counter[str] = field(default_factory=Counter)
    bytes_stored: Counter[str] = field(default_factory=Counter)
    objects_loaded: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    stores: int = 0
    demoted: int = 0
    load_seconds: float = 0.0
    paced_seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    not_stored: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    raised: dict[str, Counter[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "loads": self.loads,
            "stores": self.stores,
            "demoted": self.demoted,
            "load_seconds": self.load_seconds,
            "paced_seconds": self.paced_seconds,
            "bytes_loaded": dict(self.bytes_loaded),
            "bytes_stored": dict(self.bytes_stored),
            "failed": dict(self.failed),
            "not_stored": dict(self.not_stored),
            "unanswered": self.unanswered,
            "raised": {lane: dict(names) for lane, names in self.raised.items() if names},
        }


@dataclass(slots=True)
class TransferStats:
    """Of all tiers together, and of each; the counters of ``TierStats`` are sums here.

    Attributes:
        tiers: by name, nearest first.
        late: loads that were not waited for any longer.
        layered: loads that a request began to use layer by layer while they went on.
        prefetched: loads that began before their request, and ``prefetch_used`` of these that it found.
        not_kept: ends of sequences that no tier was told of, by reason.
    """

    tiers: dict[str, TierStats]
    late: int = 0
    layered: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    not_kept: Counter[str] = field(default_factory=Counter)

    @property
    def loads(self) -> int:
        """Units that were loaded."""
        return sum(tier.loads for tier in self.tiers.values())

    @property
    def stores(self) -> int:
        """Units that were stored."""
        return sum(tier.stores for tier in self.tiers.values())

    @property
    def bytes_loaded(self) -> Counter[str]:
        """By kind."""
        return self._sum("bytes_loaded")

    @property
    def bytes_stored(self) -> Counter[str]:
        """By kind."""
        return self._sum("bytes_stored")

    @property
    def objects_loaded(self) -> Counter[str]:
        """By group."""
        return self._sum("objects_loaded")

    @property
    def failed(self) -> Counter[str]:
        """Objects that did not arrive, by reason."""
        return self._sum("failed")

    @property
    def not_stored(self) -> Counter[str]:
        """Units that were not stored, by reason."""
        return self._sum("not_stored") + self.not_kept

    def _sum(self, name: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for tier in self.tiers.values():
            total.update(getattr(tier, name))
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "late": self.late,
            "layered": self.layered,
            "prefetched": self.prefetched,
            "prefetch_used": self.prefetch_used,
            "not_kept": dict(self.not_kept),
            "tiers": {name: tier.to_json() for name, tier in self.tiers.items()},
        }
