"""After a warm-up nothing of the host tier is compiled any more."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from kvloom.tiers.host import warmup
first = warmup.warm_up()
known = {f: set(f.signatures) for f in warmup.functions()}
import numpy as np
from kvloom.testing.units import LAYOUT, World, hit, tokens_of
from kvloom.tiers.host import HostStore
from kvloom.types import PayloadForm, Grade
with HostStore(4 << 20) as tier:
    world = World((120_000, 300_000, 5000, 9 << 17))
    for i in range(12):
        unit = world.unit(tokens_of(i, 3, ragged=i % 3))
        tier.publish(unit)
        hit(tier, world, unit)
        tier.unit(LAYOUT, unit.digests[-1].tobytes())
    for places in tier.cold_objects(5.0, 1 << 20):
        tier.rewrite(places.take(np.array([0])), [b"x" * 10], PayloadForm.LOSSLESS, Grade.FAITHFUL)
late = [f.py_func.__name__ for f in known if set(f.signatures) - known[f]]
print(first, len(known), late)
"""


def test_a_second_process_compiles_nothing() -> None:
    """The first run may find nothing on disk; whatever later processes use was compiled by a warm-up before."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
        first, count, late = done.stdout.strip().split(" ", 2)
        assert set(late.strip("[]").replace("'", "").split(", ")) <= {"", "out_of_order", "reset_refs", "add_refs"}, (
            late
        )
        assert int(count) > 30
    assert int(first) == 0
