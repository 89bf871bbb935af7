"""``--store DIR`` of commands that compute: the store is opened before anything slow, and reported at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.config import CacheConfig, exact_size, format_size, size_option
from kvloom.errors import ConfigError, InputError

if TYPE_CHECKING:
    from kvloom.tiers.disk import DiskStore
    from kvloom.transfer.hierarchy import Hierarchy
    from kvloom.transfer.options import TransferOptions


_FORMS = {"raw": "as they are"}


def store_size(store: Path | None, text: str | None) -> int | None:
    """The cap that ``--store-size`` names, in bytes; None when it was not given.  Raises ConfigError, InputError."""
    if text is None:
        return None
    if store is None:
        raise InputError("--store-size is the cap of --store DIR, which is not given; leave it out, or name one")
    from kvloom.tiers.disk.space import MINIMUM

    size = size_option(text, "--store-size")
    if size < MINIMUM:
        raise ConfigError(f"--store-size {text!r}: too small for a store; use at least {exact_size(MINIMUM)}")
    return size


@contextlib.contextmanager
def opened(directory: Path | None, capacity: int | None) -> Iterator[DiskStore | None]:
    """The store in ``directory``, closed at the end; None where there is none."""
    if directory is None:
        yield None
        return
    from kvloom.engine.stores import open_store

    with open_store(directory, capacity) as store:
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


def heads(host: int | None, directory: Path | None, store: DiskStore | None) -> dict[str, str]:
    """What the tiers of a run are called, by name: with their caps, the store by its directory as it was named."""
    named = {} if host is None else {"host": f"host memory, cap {format_size(host)}"}
    if store is not None:
        named[store.name] = f"store {directory}, cap {format_size(store.capacity)}"
    return named


def tier_lines(report: dict[str, Any], heads: Mapping[str, str], *, explain: bool = False) -> list[str]:
    """What the tiers did, and how requests got to their state, in words.

    ``report``: of ``kvloom run``; ``explain``: why objects have their forms, too.
    """
    lines = []
    for name, tier in report["tiers"]["tiers"].items():
        moved = (f"  {what} {_by_kind(tier[f'bytes_{what}'])}" for what in ("loaded", "stored"))
        lines += [f"{heads[name]}:", *moved, *_trouble(tier)]
    if report["store"] is not None and report["store"]["problem"]:
        lines.append(f"  the disk said: {report['store']['problem']}")
    lines += _form_lines(report["forms"], explain=explain)
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


def _by_kind(sizes: dict[str, int]) -> str:
    each = ", ".join(f"{kind} {format_size(size)}" for kind, size in sorted(sizes.items()) if size)
    return f"{format_size(sum(sizes.values()))}{f' ({each})' if each else ''}"


def _trouble(tier: dict[str, Any]) -> list[str]:
    lines = []
    for name, what in (("failed", "objects did not arrive"), ("not_stored", "ends were not stored")):
        if tier[name]:
            lines.append(f"  {what}: {', '.join(f'{reason} {count:,}' for reason, count in tier[name].items())}")
    return lines


def _form_lines(forms: list[dict[str, Any]], *, explain: bool) -> list[str]:
    """One line for all groups and tiers; to ``explain`` one more for each, with the reason."""
    if not forms:
        return []
    found: dict[tuple[str, str], list[str]] = {}
    for each in forms:
        found.setdefault((each["tier"], _FORMS.get(each["form"], each["form"])), []).append(each["group"])
    parts = [f"{tier} {form} ({', '.join(groups)})" for (tier, form), groups in found.items()]
    lines = [f"forms of cold objects: {'; '.join(parts)}"]
    if explain:
        lines += [
            f"  {each['group']} in {each['tier']}: {_FORMS.get(each['form'], each['form'])}, {each['reason']}"
            for each in forms
        ]
    return lines
