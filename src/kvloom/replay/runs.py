"""Every run that a command asks for: traces x device sizes x policies, each beside the optimum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from kvloom.adapters.auto_config import auto_config
from kvloom.config import format_size
from kvloom.errors import ConfigError
from kvloom.eviction import POLICIES, find_policy
from kvloom.manager.stats import Stats
from kvloom.replay.optimum import next_uses, optimum
from kvloom.replay.simulate import Ended, Outcome, simulate
from kvloom.replay.sizes import DeviceSize, least_block_bytes, trace_block_bytes
from kvloom.replay.streams import Streams
from kvloom.replay.tiered import PREFILL_SPEED, Colder, Tiered, put_behind
from kvloom.replay.trace import Trace
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.presets import resolve
from kvloom.types import IntArray

ALL = "all"
Say = Callable[[str, int], None]
"""Told what runs, and how many requests of it are done."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run and what it is measured against.

    Attributes:
        trace, spec, device, policy: what ran; ``device_bytes`` and ``device_blocks`` are the size in bytes and in
            blocks of the trace, everything kept that may be kept; ``optimum_blocks`` what the optimum has room for.
        cache_only: prompts only, as whole blocks.
        prefill_speed: tokens per second that prefill is assumed to make; None: not given.
        outcome: what the manager did.
        optimum_hits, unlimited_hits: block hits of the offline optimum, and of a cache without limits, int64
            [requests].
        tiered: colder tiers, or None; the optimum has their room, too.
    """

    trace: Trace
    spec: ModelSpec
    device: DeviceSize
    device_bytes: int
    device_blocks: int
    optimum_blocks: int
    policy: str
    cache_only: bool
    prefill_speed: float | None
    outcome: Outcome
    optimum_hits: IntArray
    unlimited_hits: IntArray
    tiered: Tiered | None = None

    @property
    def device_label(self) -> str:
        """What was asked for; a share with its bytes, and colder tiers."""
        asked = self.device.asked
        label = asked if self.device.share is None else f"{asked} ({format_size(self.device_bytes)})"
        return label if self.tiered is None else f"{label} + {self.tiered.label}"

    @property
    def short_label(self) -> str:
        """What was asked for, of all tiers."""
        return self.device.asked if self.tiered is None else f"{self.device.asked} + {self.tiered.label}"

    @property
    def block_hit_rate(self) -> float:
        """Reused leading blocks over all blocks of the prompts."""
        return self._share_of_blocks(self.outcome.block_hits)

    @property
    def token_hit_rate(self) -> float:
        """Reused tokens over all tokens of the prompts."""
        return self._share_of_tokens(self.outcome.reused)

    @property
    def optimum_block_hit_rate(self) -> float:
        """What the offline optimum reaches with room for ``optimum_blocks`` blocks."""
        return self._share_of_blocks(self.optimum_hits)

    @property
    def unlimited_block_hit_rate(self) -> float:
        """What a cache that never drops anything reaches."""
        return self._share_of_blocks(self.unlimited_hits)

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that needed no prefill."""
        return int(self.outcome.reused.sum())

    @property
    def saved_seconds(self) -> float | None:
        """Seconds of prefill that were saved at the given speed."""
        return None if self.prefill_speed is None else self.saved_tokens / self.prefill_speed

    def _share_of_blocks(self, hits: IntArray) -> float:
        return int(hits.sum()) / max(1, self.trace.blocks.size)

    def _share_of_tokens(self, tokens: IntArray) -> float:
        return int(tokens.sum()) / int(self.trace.inputs.sum())

    def to_json(self) -> dict[str, Any]:
        """The run as plain values; rates are shares in [0, 1]."""
        o, trace = self.outcome, self.trace
        return {
            "trace": {
                "name": trace.name,
                "form": trace.form,
                "block_tokens": trace.block,
                "requests": len(trace),
                "input_tokens": int(trace.inputs.sum()),
                "output_tokens": int(trace.outputs.sum()),
                "blocks": int(trace.blocks.size),
                "unique_blocks": trace.unique,
            },
            "model": self.spec.name,
            "block_size": self.spec.block_size,
            "segment_tokens": self.spec.segment_tokens,
            "device": {"asked": self.device.asked, "bytes": self.device_bytes, "blocks": self.device_blocks},
            "optimum_blocks": self.optimum_blocks,
            "policy": self.policy,
            "cache_only": self.cache_only,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "optimum_block_hit_rate": self.optimum_block_hit_rate,
            "optimum_token_hit_rate": self._share_of_tokens(block_tokens(trace, self.optimum_hits)),
            "unlimited_block_hit_rate": self.unlimited_block_hit_rate,
            "passed_through": o.passed_through,
            "answers_cut_short": o.cut_short,
            "kinds": kinds_json(o.stats, o.faults),
            "evictions": evictions_json(o.stats),
            "lookups": lookups_json(o.ended),
            "saved_prefill_tokens": self.saved_tokens,
            "prefill_tokens_per_second": self.prefill_speed,
            "saved_prefill_seconds": self.saved_seconds,
            "seconds": o.seconds,
            "manager_seconds": o.manager_seconds,
            **({} if self.tiered is None else {"tiers": self.tiered.to_json()}),
        }


def kinds_json(stats: Stats, faults: Ended) -> dict[str, Any]:
    """The counters of every kind, and how often it kept a hit from being longer, by reason."""
    return {
        kind.name.lower(): {
            "hits": s.hits,
            "misses": s.misses,
            "evictions": s.evictions,
            "bytes": s.bytes,
            "objects": s.objects,
            "commits": s.commits,
            "unkept": s.unkept,
            "stopped_lookups": {reason: n for (reason, of), n in sorted(faults.items()) if of == kind.name.lower()},
        }
        for kind, s in sorted(stats.kinds.items())
    }


def evictions_json(stats: Stats) -> dict[str, Any]:
    """Evictions by kind and reason: with one tier objects are only ever evicted to make room for others."""
    evictions = {kind.name.lower(): s.evictions for kind, s in sorted(stats.kinds.items())}
    total = sum(evictions.values())
    return {"total": total, "kinds": evictions, "reasons": {"room": total}}


def lookups_json(ended: Ended) -> dict[str, int]:
    """Lookups by what ended them, over all kinds."""
    total: Counter[str] = Counter()
    for (reason, _), n in sorted(ended.items(), key=str):
        total[reason] += n
    return dict(total)


def block_tokens(trace: Trace, hits: IntArray) -> IntArray:
    """Tokens in the ``hits`` leading blocks of every request, int64: the last block counts with its real length."""
    depths = trace.depths()
    whole = hits * trace.block
    everything = np.maximum((depths - 1) * trace.block + trace.last_block_tokens(), 0)
    tokens: IntArray = np.where((hits == depths) & (depths > 0), everything, whole)
    return tokens


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to run.  ``block``: tokens per block of ratio-1 groups; None takes the block of each trace.

    With ``colder`` tiers, every set of them is tried, and the device alone for comparison.
    """

    model: str
    devices: tuple[DeviceSize, ...]
    policies: tuple[str, ...] = ("cost",)
    block: int | None = None
    cache_only: bool = False
    prefill_speed: float | None = None
    colder: Colder = field(default_factory=Colder)

    @property
    def runs(self) -> int:
        """Runs of one trace."""
        sets = len(self.colder.sets())
        return len(self.devices) * len(self.policies) * (1 + sets)


def choose_policies(names: Sequence[str]) -> tuple[str, ...]:
    """The policies meant by ``names``; ``all`` means every one.  Raises ConfigError for an unknown name."""
    chosen: list[str] = []
    for name in names:
        try:
            chosen += POLICIES if name == ALL else (find_policy(name).name,)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {ALL}") from None
    return tuple(dict.fromkeys(chosen))


def load_spec(options: ReplayOptions, trace: Trace) -> ModelSpec:
    """The model, cut into blocks as the options or the trace say."""
    return resolve(options.model, block_size=options.block or trace.block, complete=auto_config)


def replay(trace: Trace, options: ReplayOptions, say: Say = lambda _what, _done: None) -> list[RunReport]:
    """Run one trace with every device size and policy of ``options``.

    Raises:
        InputError, ConfigError: the model or an option cannot be used.
        CapacityError: a device size cannot hold even the smallest request.
    """
    spec = load_spec(options, trace)
    streams = Streams(trace, answers=not options.cache_only)
    uses = next_uses(trace, streams.answered_blocks())
    unlimited = optimum(uses, trace.blocks.size + trace.unique)
    unit, least = trace_block_bytes(spec, trace.block), least_block_bytes(spec, trace.block)
    sets = options.colder.sized(spec, trace.unique, unit)
    best: dict[int, IntArray] = {}
    reports = []
    for device in options.devices:
        n_bytes = device.device_bytes(spec, trace.unique, unit)
        for policy in options.policies:
            what = f"{trace.name}, {device.asked}, {policy}"
            say(what, 0)
            alone = simulate(streams, spec, n_bytes, policy=policy, progress=partial(say, what))
            for tiers in sets or [()]:
                tiered = None
                if tiers:
                    more = ", ".join([what, *(f"{tier.medium.name} {tier.label}" for tier in tiers)])
                    say(more, 0)
                    speed, admission = options.prefill_speed or PREFILL_SPEED, options.colder.admission
                    make = partial(put_behind, tiers=tiers, prefill_speed=speed, admission=admission)
                    outcome = simulate(streams, spec, n_bytes, policy=policy, progress=partial(say, more), behind=make)
                    tiered = Tiered(trace, tiers, admission, speed, outcome, alone)
                # An upper bound for hybrid models: as if windows and snapshots took no room.
                room = n_bytes + sum(tier.n_bytes for tier in tiers)
                most_blocks = room // least if least else trace.unique
                if most_blocks not in best:
                    best[most_blocks] = optimum(uses, most_blocks)
                reports.append(
                    RunReport(
                        trace,
                        spec,
                        device,
                        n_bytes,
                        device.blocks(trace.unique, unit),
                        most_blocks,
                        policy,
                        options.cache_only,
                        options.prefill_speed or (tiered.prefill_speed if tiered is not None else None),
                        alone if tiered is None else tiered.outcome,
                        best[most_blocks],
                        unlimited,
                        tiered,
                    )
                )
    return reports


def by_trace(reports: Sequence[RunReport]) -> list[list[RunReport]]:
    """The runs of each trace, in order."""
    return [list(group) for _, group in groupby(reports, key=lambda report: id(report.trace))]


def duration(seconds: float) -> str:
    """Seconds for people: ``12.3 s``, ``4.5 min``, ``3.2 h``."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
