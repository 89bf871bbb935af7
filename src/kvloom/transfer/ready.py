"""Machine code of tiers and codecs, there before a request waits for it: a lane that compiles holds slots meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kvloom.tiers.contract import Tier
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.transfer.options import ColdForm


def make_ready(tiers: Sequence[Tier], cold_form: ColdForm) -> None:
    """Load what these tiers will run, or compile it, which takes some seconds once per installation."""
    if any(isinstance(tier, HostStore) for tier in tiers):
        _host()
    if any(isinstance(tier, DiskStore) for tier in tiers):
        _disk()
    if cold_form is not ColdForm.NONE:
        _forms()


@functools.cache
def _host() -> None:
    from kvloom.tiers.host.warmup import warm_up

    warm_up()


@functools.cache
def _disk() -> None:
    from kvloom.tiers.hashing.many import warm_up

    warm_up()


@functools.cache
def _forms() -> None:
    from kvloom.kernels.warmup import warm_up

    warm_up()
