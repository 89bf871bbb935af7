"""The deciding half of kvloom: what is reused, where everything lives and what goes.

``manager`` is the door, ``sequence`` one running request, ``tickets`` the plans in flight, ``explain`` says why a hit
was not longer, ``stats`` folds counters.
"""

from __future__ import annotations

from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.stats import KindStats, Stats

__all__ = ["CachedSequence", "KindStats", "Manager", "Stats"]
