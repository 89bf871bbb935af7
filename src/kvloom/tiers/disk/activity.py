"""What one handle has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.tiers.disk.health import Health
from kvloom.tiers.disk.opened import OpenIndex
from kvloom.tiers.disk.publisher import Publisher
from kvloom.tiers.disk.reads import Reads


@dataclass(frozen=True, slots=True)
class Activity:
    """What this handle has done.  Bytes written include headers and padding."""

    units_published: int
    bytes_published: int
    bytes_moved: int
    objects_read: int
    bytes_read: int
    bytes_from_disk: int
    integrity: int
    io_errors: int
    missing: int
    quarantined: int
    units_evicted: int
    extents_removed: int
    orphans: int
    rebuilds: int
    failures: int
    available: bool
    reason: str


def activity(publisher: Publisher, reads: Reads, indexes: OpenIndex, writing: Health, finding: Health) -> Activity:
    """Gather the counts of a handle's parts."""
    counts, swept = reads.counts, publisher.sweeper.done
    return Activity(
        units_published=publisher.units,
        bytes_published=publisher.bytes_stored,
        bytes_moved=publisher.mover.bytes_moved,
        objects_read=counts["ok"],
        bytes_read=counts["bytes"],
        bytes_from_disk=counts["bytes_from_disk"],
        integrity=counts["integrity"] + publisher.mover.integrity,
        io_errors=counts["io_error"],
        missing=counts["missing"],
        quarantined=counts["quarantined"] + publisher.mover.integrity,
        units_evicted=swept.units,
        extents_removed=swept.extents,
        orphans=swept.orphans,
        rebuilds=indexes.rebuilds,
        failures=writing.failures + finding.failures,
        available=writing.ready() and finding.ready(),
        reason=writing.reason or finding.reason,
    )
