"""``--store DIR`` of commands that compute: the store is opened before anything slow, and reported at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.cli.streams import say
from kvloom.config import CacheConfig, format_size, parse_size
from kvloom.errors import ConfigError, InputError

if TYPE_CHECKING:
    from kvloom.tiers.disk import DiskStore
    from kvloom.transfer.hierarchy import Hierarchy
    from kvloom.transfer.options import TransferOptions


def store_size(store: Path | None, text: str | None) -> int | None:
    """The cap that ``--store-size`` names, in bytes; None when it was not given.  Raises ConfigError, InputError."""
    if text is None:
        return None
    if store is None:
        raise InputError("--store-size is the cap of --store DIR, which is not given; leave it out, or name one")
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"option store_size: {error}") from None


@contextlib.contextmanager
def opened(directory: Path | None, capacity: int | None) -> Iterator[DiskStore | None]:
    """The store in ``directory``, closed at the end; None where there is none."""
    if directory is None:
        yield None
        return
    from kvloom.engine.stores import open_store

    with open_store(directory, capacity) as store:
        if store.rebuilt is not None and store.rebuilt.extents:
            say(f"kvloom: note: the index of {directory} was damaged; a new one was made from the extents")
        yield store


def transfer_options(settings: CacheConfig) -> TransferOptions:
    """What the settings say about moving state between tiers."""
    from kvloom.transfer.options import ColdForm, TransferOptions

    compression = settings.compression
    return TransferOptions(
        gpu_watermark=settings.gpu_watermark,
        prefetch_window=settings.prefetch_window,
        cold_form=ColdForm(compression.method) if compression.enabled else ColdForm.NONE,
        cold_below=compression.threshold,
    )


def loaded(cold: Hierarchy | None) -> int:
    """Bytes that came from the store so far."""
    return 0 if cold is None else sum(cold.stats.bytes_loaded.values())


def forms_report(tiers: Hierarchy) -> list[dict[str, Any]]:
    """The form that objects of every group take in every tier, and why; nothing where no cold form is allowed."""
    choices = [choice for link in tiers.links for choice in link.forms.table()]
    return [choice.to_json() for choice in (*choices, *(c for cooling in tiers.cooling for c in cooling.forms.table()))]


def tier_lines(report: dict[str, Any]) -> list[str]:
    """What the tiers did, and how requests got to their state, in words."""
    lines = []
    for name, tier in report["tiers"]["tiers"].items():
        loaded, stored = (sum(tier[f"bytes_{what}"].values()) for what in ("loaded", "stored"))
        lines.append(f"tier {name}: loaded {format_size(loaded)}, stored {format_size(stored)}")
    lines += [
        f"form of {form['group']} in {form['tier']}: {form['form']}, {form['reason']}" for form in report["forms"]
    ]
    if report["recovery"] is not None:
        ways = ", ".join(f"{way.replace('_', ' ')} {count}" for way, count in report["recovery"]["chosen"].items())
        lines.append(f"ways to the state of a prompt: {ways}")
    return lines


def store_report(cold: Hierarchy, store: DiskStore, kinds: Iterable[str]) -> dict[str, Any]:
    """What went to and came from the store, as JSON values."""
    stats, doing = cold.stats.tiers[store.name], store.activity()
    return {
        "directory": str(store.directory),
        "capacity_bytes": store.capacity,
        "loads": stats.loads,
        "stores": stats.stores,
        "kinds": {
            kind: {"bytes_loaded": stats.bytes_loaded[kind], "bytes_stored": stats.bytes_stored[kind]} for kind in kinds
        },
        "failed": dict(stats.failed),
        "not_stored": dict(stats.not_stored),
        "problem": doing.reason or None,
    }


def store_lines(report: dict[str, Any]) -> list[str]:
    """The same in words."""
    lines = [f"store {report['directory']}, cap {format_size(report['capacity_bytes'])}:"]
    for what in ("loaded", "stored"):
        parts = {kind: counts[f"bytes_{what}"] for kind, counts in report["kinds"].items()}
        each = ", ".join(f"{kind} {format_size(size)}" for kind, size in parts.items() if size)
        lines.append(f"  {what} {format_size(sum(parts.values()))}{f' ({each})' if each else ''}")
    for name, what in (("failed", "objects did not arrive"), ("not_stored", "ends were not stored")):
        if report[name]:
            counts = ", ".join(f"{reason} {count:,}" for reason, count in report[name].items())
            lines.append(f"  {what}: {counts}")
    if report["problem"]:
        lines.append(f"  the disk said: {report['problem']}")
    return lines
