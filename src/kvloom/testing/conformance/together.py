"""All at once, and at random."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvloom.testing.conformance.base import ROOT, Base
from kvloom.testing.model import machine
from kvloom.testing.units import (
    LAYOUT,
    World,
    hit,
    tokens_of,
)
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Published


class Together(Base):
    """All at once, and at random."""

    def test_threads_publish_read_and_evict_and_no_byte_is_wrong(self, tmp_path: Path) -> None:
        tier = self.open(tmp_path, self.small)
        world = World((120_000, 300_000, 5000))
        units = [world.unit(tokens_of(i, 3)) for i in range(16)]
        done: list[Published] = []
        errors: list[BaseException] = []
        hits: list[bool] = []

        def work(seed: int) -> None:
            random = np.random.Generator(np.random.PCG64(seed))
            try:
                for _ in range(25):
                    unit = units[int(random.integers(len(units)))]
                    if random.random() < 0.4:
                        done.append(tier.publish(unit))
                    else:
                        hits.append(hit(tier, world, unit))
                    if random.random() < 0.05:
                        tier.clear(LAYOUT, ROOT)
                    tier.usage()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert not errors, f"all methods are thread-safe: {errors[0]}"
            assert any(item.stored for item in done)
            assert tier.publish(units[0]).stored
            assert hit(tier, world, units[0])
        finally:
            tier.close()

    def test_everything_at_random_against_a_plain_model(self, tmp_path: Path) -> None:
        numbers, at = iter(range(10**6)), [tmp_path]

        def make() -> Tier:
            at[0] = tmp_path / str(next(numbers))
            at[0].mkdir()
            return self.open(at[0], self.capacity)

        def restart(tier: Tier) -> Tier:
            if not self.survives_restart:
                return tier
            tier.close()
            return self.open(at[0], self.capacity)

        run_state_machine_as_test(
            machine(make, restart),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
