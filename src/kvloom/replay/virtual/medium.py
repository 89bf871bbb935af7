"""What tells the tiers apart: how they count bytes, when they make room, and what takes time."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.errors import ConfigError
from kvloom.tiers.ledger.order import Order


@dataclass(frozen=True, slots=True)
class Medium:
    """Attributes:
    name, durable: as in ``Tier``.
    page: bytes; every object and every node has whole ones.
    header: bytes before every object.
    node: bytes of a node besides its tokens.
    run: a publication is written in whole ones of these.
    full, goal: once more than the share ``full`` of the capacity would be in use, units go until ``goal`` is.
    order: see ``Order``.
    speed: bytes read per second by default.
    latency_s: seconds that every read takes besides.
    """

    name: str
    durable: bool
    page: int
    header: int
    node: int
    run: int
    full: float
    goal: float
    order: Order
    speed: float
    latency_s: float


HOST = Medium("host", False, 4096, 0, 0, 4096, 1.0, 1.0, Order.HEAT, 50e9, 20e-6)
"""Host memory as ``HostStore`` keeps it, read over sixteen lanes of PCIe 5."""
DISK = Medium("disk", True, 256, 256, 176, 4096, 0.9, 0.8, Order.ROUNDS, 7e9, 200e-6)
"""A directory as ``DiskStore`` keeps it, on one NVMe drive with PCIe 4."""


def checked_speed(gigabytes: float, option: str) -> float:
    """Bytes per second; ConfigError for what is no speed."""
    if not 0 < gigabytes < float("inf"):
        raise ConfigError(f"{option} {gigabytes:g} is not above 0; write GB per second, such as 7")
    return gigabytes * 1e9
