"""The cold forms beside the obvious way to do the same: what quantising, packing and their inverses reach here.

The fp8 form is measured beside PyTorch's own conversions, on the same bytes, in turns, with one thread each: scale each
block by its largest magnitude, ``to(torch.float8_e4m3fn)``, and back; kvloom writes into memory that it has already, as
its tiers do.  Without torch its columns stay empty.  Beside both stands a copy of the same bytes, which shows what the
memory gives.  Each of the three is measured right after a run of its own that is not: else it would find in the caches
what another one left there, PyTorch the slot, and kvloom PyTorch's temporaries.  The data are made up: channels with
means and spreads of their own that go from token to token in random walks (``kvloom.kernels.measure.kv_like``), which
compress about as the KV of a small trained model does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvloom.kernels.forms import decode, encode
from kvloom.kernels.measure import kv_like, sample_group
from kvloom.kernels.slots import BLOCK, slot_format
from kvloom.types import AnyArray, PayloadForm

DTYPES = ("bfloat16", "float16", "float32")
DATA = "random walks per channel, 8 heads of 128"
Report = Callable[[str, int, int], None]
Pair = tuple[Callable[[], object], Callable[[], object] | None]


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One cell.  Rates are GB/s of uncompressed bytes, medians; ``speedup`` is the median of the ratios of each turn.

    ``memcpy_gbps``: a copy of the uncompressed bytes.  ``compression``: uncompressed bytes per byte of payload.
    """

    what: str
    dtype: str
    total_bytes: int
    gbps: float
    memcpy_gbps: float
    torch_gbps: float | None
    speedup: float | None
    compression: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def codec_rows(report: Report, *, layers: Sequence[int] = (2, 16), repeats: int = 5) -> list[CodecRow]:
    """Measure both forms, both ways, for every dtype and slots of several sizes; single-threaded.

    Args:
        report: called with what is done, and how much of all.
        layers: of the sample slots, 512 KiB each in 16-bit dtypes.  In a small slot torch's temporaries stay in the
            cache; in large ones it pays for fresh memory each time.
        repeats: turns, at least 5.
    """
    repeats, rows = max(5, repeats), []
    cells = [(f, d, n) for f in (PayloadForm.FP8, PayloadForm.LOSSLESS) for d in DTYPES for n in layers]
    with _one_thread() as torch:
        for number, (form, dtype, count) in enumerate(cells):
            report(f"{form.name.lower()} {dtype}", number, len(cells))
            rows += _measure(form, dtype, count, repeats, torch)
    report("codecs", len(cells), len(cells))
    return rows


def _measure(form: PayloadForm, dtype: str, layers: int, repeats: int, torch: Any) -> list[CodecRow]:
    group = sample_group(dtype, layers)
    slot, fmt = kv_like(group), slot_format(group)
    into = np.zeros_like(slot)
    payload = encode(form, slot, fmt)
    assert payload is not None
    there, back = _peer(slot, dtype, torch) if form is PayloadForm.FP8 and torch else (None, None)
    names = ("quantise", "dequantise") if form is PayloadForm.FP8 else ("split and zstd", "zstd and merge")
    pairs: tuple[Pair, Pair] = (
        (lambda: encode(form, slot, fmt, payload if form is PayloadForm.FP8 else None), there),
        (lambda: decode(form, payload, into, fmt), back),
    )
    rows, copied = [], np.zeros_like(slot)
    for name, (own, peer) in zip(names, pairs, strict=True):
        own()
        copies, times = [], []
        for _ in range(repeats):
            copies.append(_warm(lambda: np.copyto(copied, slot)))
            times.append((_warm(own), _warm(peer)) if peer else (_seconds(own), None))
        mine = statistics.median(t for t, _ in times)
        theirs = [t for _, t in times if t is not None]
        rows.append(
            CodecRow(
                f"{form.name.lower()}: {name}",
                dtype,
                len(slot),
                len(slot) / mine / 1e9,
                len(slot) / statistics.median(copies) / 1e9,
                len(slot) / statistics.median(theirs) / 1e9 if theirs else None,
                statistics.median(t / m for m, t in times if t is not None) if theirs else None,
                len(slot) / len(payload),
            )
        )
    return rows


def _peer(slot: AnyArray, dtype: str, torch: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    kind = getattr(torch, dtype)
    blocks = torch.from_numpy(slot).view(kind).view(-1, BLOCK)

    def quantise() -> Any:
        values = blocks.float()
        scale = values.abs().amax(1, keepdim=True) / 448
        return (values / scale).to(torch.float8_e4m3fn), scale

    codes, scale = quantise()
    return quantise, lambda: (codes.float() * scale).to(kind)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _warm(work: Callable[[], object]) -> float:
    """Of the second of two runs."""
    work()
    return _seconds(work)


@contextmanager
def _one_thread() -> Iterator[Any]:
    """torch, held to one thread meanwhile, or None without it."""
    try:
        import torch
    except ImportError:
        yield None
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield torch
    finally:
        torch.set_num_threads(before)
