"""What colder tiers did in a run, beside the same run without them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.config import exact_size
from kvloom.errors import ConfigError
from kvloom.manager.manager import Manager
from kvloom.manager.ways import Way
from kvloom.replay.behind import Behind
from kvloom.replay.simulate import Outcome
from kvloom.replay.sizes import DeviceSize
from kvloom.replay.trace import Trace
from kvloom.replay.virtual import DISK, HOST, Medium, VirtualClock, VirtualTier
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.disk.space import MINIMUM as DISK_MINIMUM
from kvloom.tiers.host.arrays import MINIMUM as HOST_MINIMUM
from kvloom.transfer.options import Admission

PREFILL_SPEED = 8000.0
"""Tokens per second where none is given."""
MEDIUMS = (HOST, DISK)
_LEAST = {HOST.name: HOST_MINIMUM, DISK.name: DISK_MINIMUM}


@dataclass(frozen=True, slots=True)
class Colder:
    """What ``--host`` and ``--disk`` asked for: sizes of which each is tried with each, and speeds.

    Attributes:
        hosts, disks: empty: there is no such tier.
        host_speed, disk_speed: bytes per second that are read.
        admission: which ends the tiers behind the nearest one are told of.
    """

    hosts: tuple[DeviceSize, ...] = ()
    disks: tuple[DeviceSize, ...] = ()
    host_speed: float = HOST.speed
    disk_speed: float = DISK.speed
    admission: Admission = Admission.ALWAYS

    def sets(self) -> list[tuple[Sized, ...]]:
        """Every set of tiers, each nearest first; none without tiers."""
        if not self.hosts and not self.disks:
            return []
        return [
            tuple(
                Sized(medium, size, speed)
                for medium, size, speed in ((HOST, host, self.host_speed), (DISK, disk, self.disk_speed))
                if size is not None
            )
            for host in self.hosts or (None,)
            for disk in self.disks or (None,)
        ]

    def sized(self, spec: ModelSpec, unique: int, block_bytes: int) -> list[tuple[Sized, ...]]:
        """The sets with bytes, for a trace of ``unique`` blocks; ConfigError for a tier that is too small."""
        made = [
            tuple(replace(tier, n_bytes=tier.size.device_bytes(spec, unique, block_bytes)) for tier in tiers)
            for tiers in self.sets()
        ]
        for tiers in made:
            for tier in tiers:
                tier.require()
        return made


@dataclass(frozen=True, slots=True)
class Sized:
    """One tier: its medium, its size as it was asked for and, once the trace is known, in bytes."""

    medium: Medium
    size: DeviceSize
    speed: float
    n_bytes: int = 0

    def require(self) -> None:
        """ConfigError for a size that no such tier can have."""
        least = _LEAST[self.medium.name]
        if self.n_bytes < least:
            name, asked = self.medium.name, self.size.asked
            size = "" if self.size.share is None else f" is {self.n_bytes} bytes, which"
            raise ConfigError(f"--{name} {asked}{size}: too small; a {name} tier needs at least {exact_size(least)}")

    @property
    def label(self) -> str:
        """For tables."""
        return self.size.asked


def put_behind(manager: Manager, tiers: tuple[Sized, ...], prefill_speed: float, admission: Admission) -> Behind:
    """Tiers of these sizes behind a manager."""

    def make(clock: VirtualClock) -> list[VirtualTier]:
        return [VirtualTier(tier.medium, tier.n_bytes, clock, tier.speed) for tier in tiers]

    return Behind(manager, make, prefill_speed, admission)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Times to the first token of all requests, float64 ``[requests]``, without waiting for other requests."""

    values: npt.NDArray[np.float64]

    @property
    def median(self) -> float:
        """Of half of the requests it is no more than this."""
        return float(np.percentile(self.values, 50))

    @property
    def p99(self) -> float:
        """Of 99 % of them."""
        return float(np.percentile(self.values, 99))

    @property
    def total(self) -> float:
        """Of all together."""
        return float(self.values.sum())

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        return {"median": self.median, "p99": self.p99, "total": self.total}


@dataclass(frozen=True, slots=True)
class Tiered:
    """Colder tiers of one run.

    Attributes:
        tiers: nearest first.
        admission, prefill_speed: as given.
        outcome: the run with them.
        alone: the same run with the device alone.
    """

    trace: Trace
    tiers: tuple[Sized, ...]
    admission: Admission
    prefill_speed: float
    outcome: Outcome
    alone: Outcome
    seconds: Seconds = field(init=False)
    seconds_alone: Seconds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", Seconds(np.array(self.behind.seconds)))
        computed = self.trace.inputs - self.alone.reused
        object.__setattr__(self, "seconds_alone", Seconds(computed / self.prefill_speed))

    @property
    def behind(self) -> Behind:
        """The tiers at the end."""
        assert self.outcome.behind is not None
        return self.outcome.behind

    @property
    def label(self) -> str:
        """Sizes as they were asked for."""
        return " + ".join(f"{tier.medium.name} {tier.label}" for tier in self.tiers)

    def once(self, tier: VirtualTier) -> tuple[int, int]:
        """Segments that exactly one request used, and how many of them the tier never held."""
        single = [name for name, uses in self.behind.uses.items() if uses == 1]
        return len(single), sum(name not in tier.ever for name in single)

    def to_json(self) -> dict[str, Any]:
        """Plain values; seconds, bytes and shares."""
        behind, recovery = self.behind, self.behind.recovery.stats
        tokens = int(self.trace.inputs.sum())
        return {
            "admission": self.admission.value,
            "prefill_tokens_per_second": self.prefill_speed,
            "time_to_first_token_s": self.seconds.to_json(),
            "time_to_first_token_device_alone_s": self.seconds_alone.to_json(),
            "reused_tokens_device_alone": int(self.alone.reused.sum()),
            "reused_tokens": behind.tokens_by,
            "token_hit_rate": {name: count / tokens for name, count in behind.tokens_by.items()},
            "requests": behind.served_by,
            "chosen": {way.value: recovery.chosen[way.value] for way in Way},
            "reasons": dict(sorted(recovery.reasons.items())),
            "loads_given_up": recovery.given_up,
            "replayed_tokens": recovery.replayed_tokens,
            "replay_bytes_loaded": dict(sorted(behind.replay_bytes.items())),
            "segments": {
                "seen": len(behind.uses),
                "used_once": sum(uses == 1 for uses in behind.uses.values()),
            },
            "not_kept": dict(behind.hierarchy.stats.not_kept),
            **{tier.name: self._tier(number) for number, tier in enumerate(behind.tiers)},
        }

    def _tier(self, number: int) -> dict[str, Any]:
        tier, asked = self.behind.tiers[number], self.tiers[number]
        stats = self.behind.hierarchy.links[number].stats
        usage, payload = tier.usage(), self.behind.written_by_kind(number)
        single, never = self.once(tier)
        stored = sum(payload.values())
        return {
            "asked": asked.size.asked,
            "bytes": tier.capacity,
            "bytes_in_use": usage.bytes,
            "objects": usage.objects,
            "units": usage.units,
            "bytes_per_second": tier.speed,
            "latency_s": tier.medium.latency_s,
            "loads": stats.loads,
            "bytes_read": tier.read_bytes,
            "bytes_loaded": dict(sorted(stats.bytes_loaded.items())),
            "bytes_stored": payload,
            "bytes_written": tier.written,
            "write_amplification": tier.written / stored if stored else None,
            "units_stored": stats.stores,
            "units_demoted_to": stats.demoted,
            "not_stored": dict(sorted(stats.not_stored.items())),
            "units_evicted": tier.units_evicted,
            "objects_evicted": tier.objects_evicted,
            "segments_ever_held": len(tier.ever & self.behind.uses.keys()),
            "used_once_never_held": never / single if single else None,
        }
