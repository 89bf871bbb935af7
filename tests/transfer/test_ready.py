"""Nothing of a tier is compiled, or even loaded, while a request waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random
import sys
from pathlib import Path
from tests.core.specs import FULL_WINDOW
from tests.transfer.world import World, draw
from kvloom.kernels import warmup as forms
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.hashing import many
from kvloom.tiers.host import HostStore, warmup as host
from kvloom.transfer.options import ColdForm, TransferOptions

store = DiskStore.open(Path(sys.argv[1]), 64 << 20)
options = TransferOptions(gpu_watermark=0.01, cold_form=ColdForm.FP8)
world = World(FULL_WINDOW, 1 << 20, [HostStore(8 << 20), store], options)
functions = [*host.functions(), *forms.functions(), many._digests, many._part]
known = {f: set(f.signatures) for f in functions}
prompts = [draw(random.Random(seed), 43) for seed in range(3)]
for prompt in prompts:
    world.serve(prompt)
world.settled()
for links in (world.cold.links, world.cold.links[1:]):
    world.manager.evict(1 << 30)
    world.cold.ground.links[:] = links
    print([world.serve(prompt) for prompt in prompts])
    world.settled()
print([f.__name__ for f in functions if set(f.signatures) - known[f]])
"""


def test_what_tiers_run_is_there_before_the_first_request(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[42, 42, 42]", "[42, 42, 42]", "[]"]
