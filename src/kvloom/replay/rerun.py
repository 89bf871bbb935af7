"""A recorded run once more on a real manager, without tensors: as it was, or under other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from kvloom.config import Device, format_size
from kvloom.errors import CapacityError, ConfigError, InputError, SpecError
from kvloom.eviction import find_policy
from kvloom.manager.manager import Manager
from kvloom.manager.stats import Stats
from kvloom.replay.player import Player, Progress
from kvloom.replay.recording import Recording
from kvloom.replay.runs import evictions_json, kinds_json, lookups_json
from kvloom.replay.same import Differs, SamePlayer
from kvloom.replay.simulate import Ended, Sample
from kvloom.replay.whatif import WhatIfPlayer


@dataclass(frozen=True, slots=True)
class Rerun:
    """What a recorded run did on another manager.

    Attributes:
        recording: of what.
        policy, device_bytes, device: the settings; ``device`` as it was asked for.
        requests, prompt_tokens, reused: lookups, tokens of their prompts, and of these such as needed no compute.
        refused: requests, appends and forks that did not fit.
        left_out: calls of the recording that were not made because their sequence had been refused.
        ended, faults: as in ``Outcome``.
        stats: the manager at the end.
        samples: the tier at regular times.
        same: whether everything was as recorded; None: not known, as the settings are others or the run has no end.
        difference: the first thing that was not as recorded, with its line.
        prefill_speed: tokens per second that prefill is assumed to make; None: not given.
        seconds: wall time.
    """

    recording: Recording
    policy: str
    device_bytes: int
    device: str
    requests: int
    prompt_tokens: int
    reused: int
    refused: int
    left_out: int
    ended: Ended
    faults: Ended
    stats: Stats
    samples: tuple[Sample, ...]
    same: bool | None
    difference: str | None
    prefill_speed: float | None
    seconds: float

    @property
    def token_hit_rate(self) -> float:
        """Reused tokens over all tokens of the prompts."""
        return self.reused / max(1, self.prompt_tokens)

    @property
    def saved_seconds(self) -> float | None:
        """Seconds of prefill that were saved at the given speed."""
        return None if self.prefill_speed is None else self.reused / self.prefill_speed

    @property
    def verdict(self) -> str:
        """How this compares with the recording, for people."""
        if self.difference is not None:
            return f"differs from the recording at {self.difference}"
        if self.same:
            return "same as recorded"
        if self.as_recorded:
            return "every lookup as recorded; the run was interrupted, so there are no final figures to compare"
        return "other settings than recorded"

    @property
    def as_recorded(self) -> bool:
        """Whether the settings are those of the run."""
        made = self.recording.made
        return (self.policy, self.device_bytes) == (made.policy, made.device)

    def to_json(self) -> dict[str, Any]:
        """The run as plain values; rates are shares in [0, 1]."""
        made = self.recording.made
        return {
            "recording": {
                "name": self.recording.name,
                "policy": made.policy,
                "device_bytes": made.device,
                "calls": len(self.recording),
                "finished": self.recording.end is not None,
            },
            "model": made.spec.name,
            "block_size": made.spec.block_size,
            "segment_tokens": made.spec.segment_tokens,
            "policy": self.policy,
            "device": {"asked": self.device, "bytes": self.device_bytes},
            "same_as_recorded": self.same,
            "difference": self.difference,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "token_hit_rate": self.token_hit_rate,
            "refused": self.refused,
            "calls_left_out": self.left_out,
            "kinds": kinds_json(self.stats, self.faults),
            "evictions": evictions_json(self.stats),
            "lookups": lookups_json(self.ended),
            "saved_prefill_tokens": self.reused,
            "prefill_tokens_per_second": self.prefill_speed,
            "saved_prefill_seconds": self.saved_seconds,
            "seconds": self.seconds,
        }


def rerun(
    recording: Recording,
    *,
    policy: str | None = None,
    device: Device | None = None,
    asked: str = "",
    prefill_speed: float | None = None,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Rerun:
    """Play a recording; ``policy`` and ``device`` (``asked``: as it was written) are those of the run unless given.

    With the settings of the run everything that came of every call is compared; when something differs the run is
    played to its end all the same, as under other settings.

    Raises:
        InputError: a call that the manager does not allow, with its line.
        CapacityError: the tier cannot hold even the smallest request.
        ConfigError: unknown policy.
    """
    made = recording.made
    chosen = policy or made.policy
    size = made.device if device is None else device.size
    started = clock()
    same: bool | None = None
    difference = None
    player: Player
    if (chosen, size) == (made.policy, made.device):
        try:
            player = exact = SamePlayer(recording, _manager(recording, chosen, size))
            exact.play(progress)
            if recording.end is not None:
                exact.compare_end(recording.end, exact.manager.stats())
                same = True
        except Differs as found:
            same, difference = False, str(found)
    if same is False or (chosen, size) != (made.policy, made.device):
        player = WhatIfPlayer(recording, _manager(recording, chosen, size))
        player.play(progress)
    return Rerun(
        recording,
        chosen,
        size,
        asked or format_size(size),
        player.requests,
        player.prompt_tokens,
        player.reused,
        player.refused,
        player.left_out,
        player.ended,
        player.faults,
        player.manager.stats(),
        tuple(player.samples),
        same,
        difference,
        prefill_speed,
        clock() - started,
    )


def _manager(recording: Recording, policy: str, size: int) -> Manager:
    """A manager as the run had it; at another size the index has as many places as it would have had there."""
    made = recording.made
    nodes = made.max_nodes if size == made.device else None
    try:
        if policy == made.policy:
            find_policy(policy)
    except ConfigError as error:
        raise ConfigError(f"{recording.path}, line 1: {error}; name another one with --policy") from None
    try:
        return Manager(made.spec, [Device(size)], policy=policy, max_sequences=made.max_sequences, max_nodes=nodes)
    except (ConfigError, SpecError, CapacityError) as error:
        if size != made.device:
            raise  # what was asked for cannot be
        raise InputError(f"{recording.path}, line 1: {error}; the line was changed: record the run again") from None
