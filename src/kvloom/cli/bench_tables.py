"""What ``kvloom bench tables`` shows."""

from __future__ import annotations

from collections.abc import Iterator

from kvloom.bench.tables import SEGMENTS, TOKENS, Result
from kvloom.cli.tables import Sheet
from kvloom.config import format_size


def sheets(result: Result) -> Iterator[Sheet]:
    """Three tables for people."""
    us = {(row.tokens, row.segment): f"{row.us:,.0f}" for row in result.digests}
    headers = (*(f"{n // 1024}k tokens" for n in TOKENS), "exponent")
    digests = Sheet("Digests of a whole prompt, µs", ("segment",), headers)
    for segment in SEGMENTS:
        times = (us[tokens, segment] for tokens in TOKENS)
        digests.add(str(segment), *times, f"{result.exponents[segment]:.2f}")
    yield digests
    headers = ("hit", "miss", "put", "remove", "2 reads", "moves", "bytes", "growing", "worst ms")
    cuckoo = Sheet("Cuckoo table from digests to places, 95 % full: ns and bytes per entry", ("entries",), headers)
    for row in result.cuckoo:
        times = (f"{ns:.0f}" for ns in (row.hit_ns, row.miss_ns, row.put_ns, row.remove_ns))
        parts = f"{row.two_reads:.1%}", str(row.longest), f"{row.bytes_per_entry:.1f}"
        cuckoo.add(f"{row.entries:,}", *times, *parts, f"{row.growing_ns:.0f}", f"{row.worst_ms:.1f}")
    yield cuckoo
    title = "Metadata when four fifths of the tier are in use, token store apart"
    metadata = Sheet(title, ("model",), ("KV", "metadata", "of KV", "tokens", "most of it"))
    for model in result.metadata:
        sizes = format_size(model.kv_bytes), format_size(model.metadata_bytes), f"{model.share:.3%}"
        name, size = model.parts[0]
        most = f"{name} {size / model.kv_bytes:.3%}"
        metadata.add(model.model, *sizes, format_size(model.token_store_bytes), most)
    yield metadata
