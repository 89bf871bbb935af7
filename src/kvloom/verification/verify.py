"""``verify_model``: prove or disprove on a model that a hit equals a cold run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers import attach
from kvloom.errors import InputError, KVLoomError, UnsupportedError
from kvloom.spec.from_config import spec_from_config
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.disk import DiskStore
from kvloom.types import Kind
from kvloom.verification.bench import Bench, random_tokens
from kvloom.verification.disk import TIER, resume_from_disk
from kvloom.verification.omission import leave_each_out
from kvloom.verification.report import KindResult, Omission, Report, Verdict
from kvloom.verification.scenarios import (
    after_decode,
    every_segment_boundary,
    eviction_in_between,
    fill,
    forks,
    unaligned_checkpoints,
)
from kvloom.verification.spread import measure_spread

_MIN_SEGMENTS = 3
_SLACK_BYTES = 16 << 20

Tamper = Callable[[Any], None]
"""Called with the engine when the base prompt is cached and before anything is resumed: tests plant faults with it."""
OpenStore = Callable[[], DiskStore]


def verify_model(
    model: PreTrainedModel,
    *,
    tokens: int | None = None,
    seed: int = 0,
    segment: int | None = None,
    block_size: int = 128,
    name: str = "",
    tamper: Tamper | None = None,
    store: OpenStore | None = None,
) -> Report:
    """Put kvloom against cold runs of ``model`` (in eval mode) and report.

    Args:
        model: any causal language model of transformers that kvloom has a spec for.
        tokens: length of the base prompt; by default enough for four segments and two windows.
        seed: draws all token ids.
        segment: tokens per segment, as in ``attach``.
        block_size: tokens per block, as in ``attach``.
        name: what the report calls the model.
        tamper: see ``Tamper``.
        store: opens a disk store, through which resumes are tried too.  All else is tried without it: a kind that is
            left out would come back from there.

    Raises:
        StoreError: the store did not take what was to be resumed from it.
        InputError: ``tokens`` are too few to try every kind, or more than the model allows.
        SpecError: the model has state that kvloom does not understand.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    spec = spec_from_config(
        model.config.get_text_config(decoder=True), block_size=block_size, segment=segment, dtype=dtype
    )
    count = _token_count(spec, tokens)
    report = Report(
        model=name or type(model).__name__,
        dtype=dtype,
        attention=str(model.config._attn_implementation),
        device=str(model.device),
        threads=torch.get_num_threads(),
        tokens=count,
        segment=spec.segment_tokens,
        seed=seed,
    )
    ids = random_tokens(model, count, torch.Generator().manual_seed(seed)).to(model.device)
    try:
        spread = measure_spread(model, ids, spec.segment_tokens)
    except Exception as error:  # kvloom has no part in it yet: transformers raises whatever its parts raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedError(f"transformers itself cannot run this model: {type(error).__name__}: {first}") from error
    report.spread = spread
    if not spread.supported:
        report.reason = (
            f"transformers resumes this model wrongly by itself: {spread.worst} differ by {spread.absolute:.3g} at "
            f"position {spread.position}, {spread.relative:.2g} of the logits' scale (limit {spread.limit:g})"
        )
        return report
    make = partial(
        attach,
        model,
        device=_capacity(spec, count),
        segment=spec.segment_tokens,
        block_size=block_size,
        snapshot_interval=spec.segment_tokens,
    )
    _resume_from_device(Bench(model, make(), ids, seed, spread, report), tamper)
    if store is not None and report.first_failure is None:
        resume_from_disk(model, ids, seed, spread, report, partial(_with_store, make, store))
    _judge(report, spec)
    return report


def _with_store(make: Callable[..., Any], store: OpenStore) -> Any:
    opened = store()
    try:
        return make(store=opened)
    except BaseException:
        opened.close()
        raise


def _resume_from_device(bench: Bench, tamper: Tamper | None) -> None:
    """Everything that can be tried with one tier."""
    engine, report = bench.engine, bench.report
    try:
        fill(bench)
        if tamper is not None:
            tamper(engine)
        # What a failed scenario leaves in the cache would only make the later ones fail, too.
        for scenario in (every_segment_boundary, unaligned_checkpoints, after_decode, forks, _require_no_eviction,
                         leave_each_out, eviction_in_between):  # fmt: skip
            if report.first_failure is None:
                scenario(bench)
        engine.manager.check_integrity()
    finally:
        engine.close()


def _token_count(spec: ModelSpec, asked: int | None) -> int:
    """Length of the base prompt: whole segments, a ragged rest and the last token."""
    segment = spec.segment_tokens
    window = max((g.window for g in spec.groups), default=0)
    least = max(_MIN_SEGMENTS * segment, window + segment) + 2
    if asked is None:
        wanted = max(4 * segment, -(-2 * window // segment) * segment + segment) + segment // 3 + 2
        asked = min(wanted, spec.max_positions - 2 * segment) if spec.max_positions else wanted
    if asked < least:
        raise InputError(
            f"{asked} tokens are too few: {_MIN_SEGMENTS} segments of {segment} tokens and a full window of {window} "
            f"need at least {least}"
        )
    most = spec.max_positions - 2 * segment
    if spec.max_positions and asked > most:
        raise InputError(
            f"{asked} tokens are too many: the model has {spec.max_positions} positions and the resumes need two "
            f"segments of {segment} tokens more; use at most {most}"
        )
    return asked


def _capacity(spec: ModelSpec, tokens: int) -> int:
    """Device bytes that hold the base prompt and every branch at once, so that nothing is evicted unasked."""
    segment = spec.segment_tokens
    boundaries = tokens // segment
    branches = boundaries + 12 + 2 * len(spec.groups)
    total = 0
    for group in spec.groups:
        slots = 4 * branches + boundaries
        if not group.is_snapshot:
            held = tokens + branches * (4 * segment + group.window)
            slots += held // group.block_tokens
        total += slots * group.slot_bytes
    return total + total // 8 + _SLACK_BYTES


def _require_no_eviction(bench: Bench) -> None:
    """The arena was sized so that nothing goes by itself: a hit that ends early is then never for lack of room."""
    evicted = sum(kind.evictions for kind in bench.engine.manager.stats().kinds.values())
    if evicted:
        raise KVLoomError(f"{evicted} objects were evicted although the arena was sized for all of them")


def _judge(report: Report, spec: ModelSpec) -> None:
    """Set the verdict and its reason."""
    report.verdict = Verdict.DIFFERS
    failure = report.first_failure
    if failure is not None:
        found = failure.difference
        report.reason = f"{failure.scenario} at {failure.position}: {found or 'the logits differ'}"
        return
    for group in spec.groups:
        if group.is_snapshot and group.needed_unless_multiple_of == 1:
            continue  # rows that wait to be compressed, at a ratio of 1: there never are any
        result = report.groups.get(group.name, KindResult())
        kind = group.kind.name.lower()
        if not result.objects_restored:
            report.reason = f"{kind} ({group.name}) was never restored, so nothing is known about it"
            return
        if report.store is not None and not result.bytes_restored.get(TIER):
            report.reason = f"{kind} ({group.name}) was never restored from disk, so nothing is known about that"
            return
        if result.omission is not Omission.DETECTED and (result.changes_logits or result.omission is None):
            what = result.omission.value if result.omission else "never tried"
            report.reason = f"{kind} ({group.name}) left out: {what}"
            return
    if not report.evicted_bytes:
        report.reason = "nothing was evicted, so nothing is known about resuming after eviction"
        return
    report.verdict = Verdict.EXACT
    kinds = ", ".join(kind.name.lower() for kind in sorted(report.kinds, key=Kind))
    report.reason = f"{len(report.boundaries)} resumes equal to cold runs; kinds restored: {kinds}"
