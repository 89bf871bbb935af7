"""kvloom's own side: the manager through the methods that the transformers adapter and the replay call too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np

from kvloom.bench.core.scenario import CONFIGS, Group, Ids, Plan, Served
from kvloom.config import Device
from kvloom.manager.decoding import Batch
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.types import Kind

TOKEN = 7
Clock = Callable[[], int]


def spec_of(config: str, segment: int | None = None, longest: int = 0) -> ModelSpec:
    """The spec of a config, one layer per group; by default cut as finely as it can be, for prompts of any length."""
    groups = tuple(_group(f"group.{i}", config, group) for i, group in enumerate(CONFIGS[config]))
    finest = max(group.block for group in CONFIGS[config])
    return ModelSpec(config, groups, block_size=finest, segment_tokens=segment or finest, max_positions=longest)


def _group(name: str, config: str, group: Group) -> GroupSpec:
    kind = Kind.WINDOW if group.window else Kind.COMPRESSED
    if config != "dsv4":
        tensors = tuple(TensorSpec(n, (8, 128), "bfloat16", entry_axis=1) for n in ("keys", "values"))
    elif group.block >= 64:
        tensors = (TensorSpec("compressed_kv" if group.ratio > 1 else "keys", (584,), "uint8", entry_axis=0),)
    else:
        tensors = (TensorSpec("state", (8192 // group.block,), "float32", entry_axis=0),)
    return GroupSpec(name, kind, (0,), tensors, group.ratio, group.block, group.window)


class ManagerDriver:
    """``Manager`` for one config at a time.

    Args:
        clock: nanoseconds of CPU time of this thread.
        segment: tokens per segment; by default the largest block.
    """

    def __init__(self, clock: Clock, segment: int | None = None) -> None:
        self._clock, self._segment = clock, segment
        self.granule = 0
        self.manager: Manager | None = None
        self._batch: Batch | None = None
        self._dense = self._uneven = False
        self._sizes: list[int] = []

    def version(self) -> str:
        """Name and version."""
        from kvloom import __version__

        return f"kvloom {__version__}"

    def supports(self, config: str, case: str) -> bool:
        """Everything."""
        return True

    def make(self, plan: Plan) -> None:
        """A manager whose tier holds the plan's objects and blocks."""
        self.manager = self._batch = None
        gc.collect()
        spec = spec_of(plan.config, self._segment, plan.row)
        self.granule, self._dense = spec.segment_tokens, plan.dense
        self._sizes = sizes = [group.slot_bytes for group in spec.groups]
        needed = plan.objects * max(sizes) + sum(n * size for n, size in zip(plan.blocks(), sizes, strict=True))
        self._uneven = len(set(sizes)) > 1  # so pages have a rest that is not used
        needed += needed // 4 if self._uneven else 0
        # like the others; "cost" lets go of most windows, and with them of hits in the middle of what is cached
        self.manager = Manager(spec, [Device(needed)], max_sequences=plan.sequences, policy="lru")
        for record in (self.manager.arrays, self.manager.rows):
            for array in dict(record.items()).values():  # an engine has run for long: no page of memory is new
                flat = array.reshape(-1)
                flat[::256] = flat[::256].copy()

    @property
    def _made(self) -> Manager:
        assert self.manager is not None
        return self.manager

    # ---------------------------------------------------------------- requests

    def keep(self, ids: Ids) -> Ids:
        """The buffer itself."""
        return ids

    def serve(self, prompt: Ids, chunk: int) -> Served:
        """Open, append, commit and close."""
        manager, clock, total = self._made, self._clock, len(prompt)
        chunk = self.granule if self._dense else chunk
        began = clock()
        sequence = manager.open(prompt)
        manager.complete(sequence.restore)
        at = clock()
        done = reused = sequence.reused
        allocate = commit = 0
        opened = at - began
        while done < total:
            end = min(total, done + (chunk or total))
            manager.complete(sequence.append(prompt[done:end]))
            appended = clock()
            manager.complete(sequence.commit())
            committed = clock()
            allocate += appended - at
            commit += committed - appended
            done, at = end, committed
        sequence.close()
        return Served(reused, {"lookup": opened, "allocate": allocate, "commit": commit, "free": clock() - at})

    def look(self, prompt: Ids) -> Served:
        """Open and close."""
        began = self._clock()
        sequence = self._made.open(prompt)
        self._made.complete(sequence.restore)
        sequence.close()
        return Served(sequence.reused, {"lookup": self._clock() - began})

    def cached(self) -> int:
        """Committed objects."""
        return sum(kind.objects for kind in self._made.stats().kinds.values())

    # ---------------------------------------------------------------- decode

    def begin(self, prompts: Sequence[Ids]) -> None:
        """Open and prefill the sequences of a batch."""
        manager = self._made
        self._sequences: list[CachedSequence] = []
        for prompt in prompts:
            sequence = manager.open(prompt)
            manager.complete(sequence.restore)
            manager.complete(sequence.append(prompt[sequence.reused :]))
            manager.complete(sequence.commit())
            self._sequences.append(sequence)
        self._batch = manager.batch(self._sequences)
        self._tokens = np.full(len(prompts), TOKEN, dtype=np.int32)

    def step(self) -> Served:
        """One batched step; the engine's buffer of sampled ids is there already."""
        manager, batch = self._made, self._batch
        assert batch is not None
        began = self._clock()
        for plan in manager.step(batch, self._tokens):
            manager.complete(plan)
        return Served(0, {"step": self._clock() - began})

    def end(self) -> None:
        """Commit the last token and close."""
        manager, batch = self._made, self._batch
        assert batch is not None
        for plan in manager.finish(batch):
            manager.complete(plan)
        for sequence in self._sequences:
            sequence.close()
        self._batch = None
        self._sequences = []

    # ---------------------------------------------------------------- the rest

    def clear(self, blocks: Sequence[int]) -> None:
        """``Manager.evict`` of the blocks' bytes, as far as they are not free."""
        needed = sum(n * size for n, size in zip(blocks, self._sizes, strict=True))
        needed += needed // 4 if self._uneven else 0
        lacking = needed - (self._made.cap - self._made.stats().used)
        if lacking > 0:
            self._made.evict(lacking)

    def evict(self, objects: int) -> Served:
        """``Manager.evict`` of so many objects' bytes."""
        size = max(self._sizes)
        began = self._clock()
        self._made.evict(objects * size)
        return Served(0, {"evict": self._clock() - began})

    def forget_windows(self) -> None:
        """Drop every window object."""
        self._made.drop(Kind.WINDOW)

    def disagree(self, ids: Ids) -> None:
        """Drop one window group's blocks in every other stretch, another's in the rest."""
        manager = self._made
        windows = [group for group in manager.spec.groups if group.window][:2]
        half = max(self.granule, *(group.window for group in windows))
        for turn, group in enumerate(windows):
            for start in range(0, len(ids), group.block_tokens):
                if start // half % 2 != turn:
                    manager.drop(group.name, start)

    def convert(self, ids: list[int]) -> Served:
        """A list to the engine's buffer."""
        began = self._clock()
        np.fromiter(ids, dtype=np.int32, count=len(ids))
        return Served(0, {"convert": self._clock() - began})

    def digest(self, ids: Ids) -> Served | None:
        """Tokens are compared one by one; the index of the device tier has no digests."""
        return None

    def bytes_per_object(self) -> float:
        """Bytes of all live arrays of the core, the token store apart, over the objects in the index."""
        manager = self._made
        arrays = [array for record in (manager.arrays, manager.rows) for _, array in record.items()]
        total = sum(a.nbytes for a in arrays) - manager.arrays.tokens.nbytes
        return total / max(1, self.cached())
