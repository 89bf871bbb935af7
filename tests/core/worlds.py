"""The models and arenas in which the core and the reference live side by side."""

from __future__ import annotations

from dataclasses import dataclass

from tests.core import specs

from kvloom.spec.model_spec import ModelSpec

KIB = 1024


@dataclass(frozen=True)
class World:
    """A model on an arena of one size, perhaps with few index places and few rows, perhaps split statically."""

    spec: ModelSpec
    arena: int
    max_sequences: int = 6
    max_nodes: int = 200
    alphabet: int = 2
    split: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.spec.name}, {self.arena // KIB} KiB, {self.max_nodes} nodes{', split' * self.split}"


WORLDS = (
    World(specs.FULL, 40 * KIB, 3),
    World(specs.FULL, 64 * KIB, 4, max_nodes=14),
    World(specs.FULL, 200 * KIB, 5, max_nodes=7),
    World(specs.FULL_WINDOW, 46 * KIB, 3, split=True),
    World(specs.FULL_WINDOW, 80 * KIB, 5, max_nodes=20),
    World(specs.THREE_SEGMENTS, 90 * KIB, 3, split=True),
    World(specs.THREE_SEGMENTS, 200 * KIB, max_nodes=24),
    World(specs.V4, 150 * KIB, 3, max_nodes=40, split=True),
    World(specs.V4, 200 * KIB, 4, max_nodes=16),
    World(specs.V4, 17 * KIB, 2),
    World(specs.RECURRENT, 60 * KIB, 3, split=True),
    World(specs.RECURRENT, 96 * KIB, 4, max_nodes=24),
    World(specs.STATE_ONLY, 40 * KIB, 3, max_nodes=30, split=True),
    World(specs.STATE_ONLY, 80 * KIB, 5),
    World(specs.TINY, 30 * KIB, 3, max_nodes=30, alphabet=3, split=True),
    World(specs.TINY, 72 * KIB, alphabet=3),
    World(specs.LARGE_LCM, 60 * KIB, 3, split=True),
    World(specs.LARGE_LCM, 112 * KIB, 3, max_nodes=24),
    World(specs.CHUNKS_ONLY, 30 * KIB, 3, max_nodes=20, split=True),
    World(specs.CHUNKS_ONLY, 72 * KIB),
    World(specs.HEAVY_PATH, 75 * KIB, 3, max_nodes=40, split=True),
    World(specs.HEAVY_PATH, 100 * KIB, 4),
    World(specs.HEAVY_PATH, 60 * KIB, 3, max_nodes=24),
    # So small that there are hardly more pages than groups.
    World(specs.FULL_WINDOW, 16 * KIB, 3),
    World(specs.THREE_SEGMENTS, 26 * KIB, 3),
    World(specs.V4, 36 * KIB, 3, max_nodes=40),
    World(specs.RECURRENT, 20 * KIB, 3),
    World(specs.STATE_ONLY, 16 * KIB, 3),
    World(specs.LARGE_LCM, 24 * KIB, 3),
)
