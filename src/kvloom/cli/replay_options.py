"""What the options of ``kvloom replay`` about tiers mean."""

from __future__ import annotations

from pathlib import Path

from kvloom.errors import InputError
from kvloom.replay.sizes import DeviceSize
from kvloom.replay.tiered import Colder
from kvloom.replay.virtual import DISK, HOST
from kvloom.replay.virtual.medium import checked_speed
from kvloom.transfer.options import Admission


def require_trace(path: Path, model: str | None, block: int | None, colder: Colder, *, cache_only: bool) -> None:
    """Raise InputError for what does not go with the recording at ``path``."""
    if colder.sets():
        raise InputError(
            f"{path} is a recording: it holds what was asked of one device, not what a host or disk tier was given; "
            "replay it without --host and --disk, or a trace with them"
        )
    for given, option in ((model, "--model"), (block, "--block"), (cache_only or None, "--cache-only")):
        if given is not None:
            raise InputError(f"{option} is for traces, but {path} is a recording; leave {option} out")


def sizes_of(given: list[str] | None, tier: str) -> tuple[DeviceSize, ...]:
    """Sizes as an option of a tier gave them; raises ConfigError."""
    return tuple(DeviceSize.parse(part, tier) for text in given or () for part in text.split(","))


def colder_of(
    hosts: tuple[DeviceSize, ...],
    disks: tuple[DeviceSize, ...],
    host_speed: float | None,
    disk_speed: float | None,
    admission: Admission | None,
) -> Colder:
    """Tiers and speeds; raises InputError for what belongs to a tier that is not there, ConfigError for no speed."""
    for given, option, tier, sizes in (
        (host_speed, "--host-speed", "--host", hosts),
        (disk_speed, "--disk-speed", "--disk", disks),
    ):
        if given is not None and not sizes:
            raise InputError(f"{option} is about a tier that is not there; add {tier} SIZE, or leave {option} out")
    if admission is not None and not (hosts and disks):
        raise InputError("--admission is about a disk behind a host; add --host SIZE and --disk SIZE, or leave it out")
    return Colder(
        hosts,
        disks,
        HOST.speed if host_speed is None else checked_speed(host_speed, "--host-speed"),
        DISK.speed if disk_speed is None else checked_speed(disk_speed, "--disk-speed"),
        Admission.ALWAYS if admission is None else admission,
    )
