"""The deciding half of kvloom: what is reused, where everything lives and what goes.

A request goes down through the folder, and a module imports only what stands below it:

* ``watched`` tells each call and what came of it (``events``); ``warmup`` makes them all once.
* ``manager`` is the door.
* Its rooms: ``decoding`` steps whole batches, ``colder`` is all about colder tiers (``surveys``).
* ``sequence`` is one running request: ``leasing`` takes what it holds, ``keeping`` what is kept of its end, ``explain``
  says why its hit was not longer, ``ranges`` as what its tokens exist.
* ``books`` is what all of these work on: ``namespaces``, the ``roster`` of who runs, ``tickets`` and ``transfers`` in
  flight, the ``capacity`` that is left.

``recovery`` (``ways``, ``estimates``) chooses between ways back and needs no manager; ``stats`` folds counters.
"""

from __future__ import annotations

from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.stats import KindStats, Stats

__all__ = ["CachedSequence", "KindStats", "Manager", "Stats"]
