"""``kvloom store``: what is in a disk store, and keeping house in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import streams
from kvloom.cli.failures import guarded
from kvloom.errors import InputError, StoreError

if TYPE_CHECKING:
    from kvloom.tiers.disk import DiskStore
    from kvloom.tiers.disk.checking import Contents

store = typer.Typer(name="store", help="Look into a disk store, check it, clean it up, carry it.", no_args_is_help=True)

Place = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
SHOWN = 12
"""Hex digits of a digest in tables."""


@contextlib.contextmanager
def _opened(directory: Path, capacity: int | None = None, *, create: bool = False) -> Iterator[DiskStore]:
    """The store; trouble with the disk becomes one line."""
    from kvloom.tiers.disk import DiskStore

    try:
        with DiskStore.open(directory, capacity, create=create) as opened:
            yield opened
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StoreError(
            f"store {directory}: {error.strerror or error}{where}; all in it has to be yours to read and write, "
            "on a disk that works and has room"
        ) from error


@store.command("ls")
@guarded
def list_units(
    directory: Place,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Units in the table; JSON has all.")] = 50,
    as_json: AsJson = False,
) -> int:
    """The units, the one worth most first."""
    from kvloom.cli.tables import Sheet
    from kvloom.config import format_size

    with _opened(directory) as opened:
        units = opened.units()
    if as_json:
        streams.emit_json({"units": [asdict(unit) for unit in units]})
        return 0
    numbers = ("tokens", "nodes", "objects", "payload", "last used", "hits")
    sheet = Sheet(f"{len(units):,} units", ("unit", "namespace", "layout"), numbers)
    for unit in units[:limit]:
        names = (name[:SHOWN] for name in (unit.digest, unit.root, unit.layout))
        counts = f"{unit.tokens:,}", f"{unit.nodes:,}", f"{unit.objects:,}", format_size(unit.payload)
        sheet.add(*names, *counts, f"{unit.touched:,}", f"{unit.hits:,}")
    streams.screen().print(sheet)
    if len(units) > limit:
        streams.say(f"kvloom: note: {len(units) - limit:,} more; use --limit {len(units)} or --json")
    return 0


@store.command()
@guarded
def stats(directory: Place, *, as_json: AsJson = False) -> int:
    """Sizes and counts."""
    from kvloom.cli.tables import facts

    with _opened(directory) as opened:
        contents = opened.contents()
    if as_json:
        streams.emit_json({**asdict(contents), "write_amplification": contents.write_amplification})
    else:
        streams.screen().print(facts(_rows(contents)))
    return 0


def _rows(contents: Contents) -> list[tuple[str, str]]:
    from kvloom.config import format_size

    share = contents.in_use / contents.capacity
    written = f"{format_size(contents.bytes_published)}, and {format_size(contents.bytes_moved)} to make room"
    if contents.write_amplification is not None:
        written += f": {contents.write_amplification:.2f} bytes per byte"
    return [
        ("cap", format_size(contents.capacity)),
        ("in use", f"{format_size(contents.in_use)}, {share:.1%} of the cap, promised room among it"),
        ("on disk", f"{format_size(contents.on_disk)}, the index {format_size(contents.index)} of it"),
        ("extents", f"{contents.extents:,}, {format_size(contents.live)} in them needed"),
        ("units", f"{contents.units:,} in {contents.layouts:,} layout{'' if contents.layouts == 1 else 's'}"),
        ("nodes", f"{contents.nodes:,}"),
        ("objects", f"{contents.objects:,}, {format_size(contents.payload)} of payload"),
        ("quarantined", f"{contents.quarantined:,} objects"),
        ("stored so far", f"{format_size(contents.payload_published)} of payload since the index was made"),
        ("written for it", written),
    ]


@store.command()
@guarded
def verify(directory: Place, *, as_json: AsJson = False) -> int:
    """Read and check everything; damaged objects are quarantined.

    Exit code: 0 all well, 1 something was damaged, 2 no store or unusable.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from kvloom.config import format_size

    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    status = streams.progress()
    with _opened(directory) as opened, Progress(*columns, console=status, disable=not status.is_terminal) as progress:
        task = progress.add_task("checking", total=None)
        done = opened.verify(lambda read, total: progress.update(task, completed=read, total=total))
    if as_json:
        streams.emit_json({"ok": done.ok, **asdict(done)})
        return int(not done.ok)
    sound = ": nothing is wrong" if done.ok else ""
    streams.emit(f"{done.objects:,} objects of {done.units:,} units checked, {format_size(done.bytes)}{sound}")
    for number, noun, what in (
        (done.integrity, "object", "damaged: quarantined, and never used again"),
        (done.io_errors, "object", "that could not be read"),
        (done.missing, "object", "gone"),
        (done.incomplete, "unit", "not whole: misses, until their prompts are computed and stored again"),
    ):
        if number:
            streams.emit(f"{_count(number, noun)} {what}")
    for problem in done.problems:
        streams.emit(problem)
    return int(not done.ok)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@store.command()
@guarded
def gc(directory: Place, *, as_json: AsJson = False) -> int:
    """Collect orphans, drop what no unit needs, and copy together what is mostly waste."""
    from kvloom.config import format_size

    with _opened(directory) as opened:
        before = opened.contents().on_disk
        done = opened.gc()
        after = opened.contents().on_disk
    if as_json:
        result = {
            "units": done.units,
            "objects": done.objects,
            "extents": done.extents,
            "compacted": done.compacted,
            "orphans": done.orphans,
        }
        streams.emit_json({"before": before, "after": after, **result})
    else:
        evicted = f"{_count(done.units, 'unit')} evicted to get below the cap, " if done.units else ""
        streams.emit(
            f"{format_size(before)} before, {format_size(after)} after: {evicted}{done.objects:,} objects dropped, "
            f"{done.extents:,} extents removed ({done.compacted:,} of them copied), {done.orphans:,} orphans collected"
        )
    return 0


@store.command()
@guarded
def clear(
    directory: Place,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    layout: Annotated[str | None, typer.Option(help="Only of this layout (64 hex digits, with --namespace).")] = None,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace: its root, as ls --json says.")] = None,
    as_json: AsJson = False,
) -> int:
    """Remove all units, or those of one namespace."""
    if (layout is None) != (namespace is None):
        raise InputError("--layout and --namespace go together; ls --json shows both of every unit")
    names = [
        None if text is None else _digest(text, option)
        for text, option in ((layout, "layout"), (namespace, "namespace"))
    ]
    with _opened(directory) as opened:
        if not yes:
            count = sum(
                namespace is None or (unit.layout == layout and unit.root == namespace) for unit in opened.units()
            )
            raise InputError(f"this would remove {count:,} units of {directory}; add --yes to do it")
        removed = opened.clear(*names)
    if as_json:
        streams.emit_json({"units": removed})
    else:
        streams.emit(f"{removed:,} units removed")
    return 0


def _digest(text: str, option: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise InputError(f"--{option} {text!r} is not 64 hex digits; ls --json shows them")
    return digest


@store.command("export")
@guarded
def export_archive(
    directory: Place,
    file: Annotated[Path, typer.Argument(help="The archive, a new file.")],
    *,
    as_json: AsJson = False,
) -> int:
    """Write all units to an archive."""
    from kvloom.config import format_size

    with _opened(directory) as opened, streams.progress().status("exporting"):
        done = opened.export_archive(file)
    if as_json:
        streams.emit_json(asdict(done))
    else:
        skipped = f"; {done.skipped:,} could not be read whole and were left out" if done.skipped else ""
        streams.emit(f"{done.units:,} units with {done.objects:,} objects, {format_size(done.bytes)}{skipped}")
    return 0


@store.command("import")
@guarded
def import_archive(
    directory: Place,
    file: Annotated[Path, typer.Argument(help="The archive.")],
    *,
    capacity: Annotated[
        str | None, typer.Option(help="Cap of the store, such as 100GiB; a new store needs one.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Take in the units of an archive, from somebody you trust: nobody can tell whether state is right."""
    from kvloom.config import exact_size, format_size, size_option
    from kvloom.tiers.disk.space import MINIMUM

    cap = None if capacity is None else size_option(capacity, "--capacity")
    if cap is not None and cap < MINIMUM:
        raise InputError(f"--capacity {capacity!r}: too small for a store; use at least {exact_size(MINIMUM)}")
    if not file.is_file():
        raise StoreError(f"{file} cannot be read: no such file; name an archive of kvloom store export")
    if cap is None and (not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))):
        raise InputError(f"{directory} is no store yet, and a new one needs a cap; add --capacity SIZE, such as 16GiB")
    with _opened(directory, cap, create=True) as opened, streams.progress().status("importing"):
        counts: dict[str, Any] = {str(outcome): count for outcome, count in opened.import_archive(file).items()}
        reason = opened.activity().reason
        held = opened.capacity
    if left := counts.get("no_room", 0) + counts.get("incomplete", 0):
        streams.say(
            f"kvloom: note: {left:,} units were not taken: they, or what they build on, have no room below the cap of "
            f"{format_size(held)}; --capacity raises it"
        )
    if as_json:
        streams.emit_json({"outcomes": counts})
    else:
        streams.emit(", ".join(f"{count:,} {name}" for name, count in counts.items()) or "the archive is empty")
    if counts.get("unavailable"):
        raise StoreError(f"{directory}: units could not be stored: {reason}")
    return 0
