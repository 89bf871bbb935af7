"""kvloom as its own peer, in another process; ``KVLOOM_TEST_BURN`` microseconds are burnt in every commit."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from kvloom.bench.core.manager_driver import ManagerDriver
from kvloom.manager.sequence import CachedSequence


def burn(us: int) -> None:
    """Use the processor for so long."""
    end = time.thread_time_ns() + us * 1000
    while time.thread_time_ns() < end:
        pass


def make_driver(clock: Any, served: Any, configs: Any) -> ManagerDriver:
    """The driver."""
    us, commit = int(os.environ.get("KVLOOM_TEST_BURN", "0")), CachedSequence.commit

    def slow(*args: Any, **named: Any) -> Any:
        burn(us)
        return commit(*args, **named)

    CachedSequence.commit = slow  # type: ignore[method-assign]
    return ManagerDriver(clock)
