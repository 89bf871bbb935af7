"""How fast this machine encodes and decodes, measured in a few tens of milliseconds.  The clock is the caller's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvloom.kernels.choice import CodecSpeed
from kvloom.kernels.forms import decode, encode, forms_of
from kvloom.kernels.slots import SlotFormat, slot_format
from kvloom.spec.model_spec import GroupSpec, TensorSpec
from kvloom.types import AnyArray, Kind, PayloadForm

Clock = Callable[[], float]
"""Seconds, from any origin, that only go forward."""

_HEADS, _ENTRIES, _DIM = 8, 128, 128
_SETTLE = 1e-7


def sample_group(dtype: str = "bfloat16", layers: int = 2) -> GroupSpec:
    """Ordinary attention: keys and values of 8 heads of 128, blocks of 128 tokens, 512 KiB a layer in bfloat16."""
    tensors = tuple(TensorSpec(name, (_HEADS, _DIM), dtype, entry_axis=1) for name in ("keys", "values"))
    return GroupSpec("sample", Kind.COMPRESSED, tuple(range(layers)), tensors, block_tokens=_ENTRIES)


def kv_like(group: GroupSpec, seed: int = 0) -> AnyArray:
    """A slot of ``sample_group`` with made-up state that compresses about as real KV does; uint8 [slot_bytes].

    Each channel has a mean and a spread of its own, log-normal as in trained models, and goes from token to token in a
    random walk that is pulled back to its mean.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    shape = (len(group.layers) * len(group.tensors) * _HEADS, _DIM)
    mean = rng.standard_normal(shape)
    spread = np.exp(0.5 * rng.standard_normal(shape))
    walk = np.empty((shape[0], _ENTRIES, _DIM), np.float32)
    at = rng.standard_normal(shape)
    for entry in range(_ENTRIES):
        at = 0.7 * at + 0.714 * rng.standard_normal(shape)
        walk[:, entry] = mean + spread * at
    if group.tensors[0].dtype == "bfloat16":
        bits = walk.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).ravel().view(np.uint8)
    return walk.astype(group.tensors[0].dtype).ravel().view(np.uint8)


def measure_codecs(
    clock: Clock, sample: tuple[AnyArray, SlotFormat] | None = None, *, repeats: int = 5
) -> tuple[CodecSpeed, ...]:
    """The speed of every form that the sample may take, single-threaded: medians of ``repeats`` turns.

    Args:
        clock: for example ``time.perf_counter``.
        sample: a slot (uint8, whole) and its format; by default 1 MiB of ``kv_like``, whose ratio is a guess about
            other data.
        repeats: turns; five take about 30 ms.  The very first call on a machine also compiles, outside the clock.

    A form that the sample cannot take, because it would not be smaller or is not finite, is left out.
    """
    slot, fmt = sample or _default_sample()
    into, speeds = np.zeros(-(-fmt.nbytes // 8), np.uint64).view(np.uint8)[: fmt.nbytes], []
    for form in forms_of(fmt):
        payload = encode(form, slot, fmt)
        if payload is None:
            continue
        decode(form, payload, into, fmt)
        encodes, decodes = [], []
        for _ in range(repeats):
            start = clock()
            if form is PayloadForm.RAW:
                into[:] = slot
            else:
                encode(form, slot, fmt)
            middle = clock()
            decode(form, payload, into, fmt)
            encodes.append(middle - start)
            decodes.append(clock() - middle)
        seconds = [max(float(np.median(times)), _SETTLE) for times in (encodes, decodes)]
        speeds.append(CodecSpeed(form, fmt.nbytes / seconds[0], fmt.nbytes / seconds[1], fmt.nbytes / len(payload)))
    return tuple(speeds)


def _default_sample() -> tuple[AnyArray, SlotFormat]:
    group = sample_group()
    return kv_like(group), slot_format(group)
