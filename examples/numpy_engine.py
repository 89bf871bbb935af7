"""The smallest engine that drives kvloom: one NumPy arena, a toy model, no torch.  docs/engine.md explains it.

The model keeps state of four kinds, and its answers depend on all of it, so a wrong byte would show as a wrong token.
"""

from __future__ import annotations

import threading

import numpy as np

from kvloom import CachedSequence, CopyPlan, Device, GroupSpec, Kind, Manager, ModelSpec, TensorSpec

VOCABULARY = 50


def tensor(name: str, *shape: int, entry_axis: int | None = 0) -> TensorSpec:
    """One state tensor of integers."""
    return TensorSpec(name, shape, "int64", entry_axis=entry_axis)


FULL, POOLED, WINDOW, PENDING, RECURRENT = range(5)
SPEC = ModelSpec(
    "toy",
    groups=(  # two full layers of two heads, one that pools 4 tokens into an entry, a window of 12, a recurrent one
        GroupSpec("full", Kind.COMPRESSED, (0, 1), (tensor("keys", 2, 1, entry_axis=1),), block_tokens=8),
        GroupSpec("pooled", Kind.COMPRESSED, (2,), (tensor("entries", 1),), ratio=4, block_tokens=8),
        GroupSpec("window.12", Kind.WINDOW, (3,), (tensor("keys", 1), tensor("values", 1)), block_tokens=8, window=12),
        GroupSpec("pending", Kind.TAIL, (2,), (tensor("tokens", 4, entry_axis=None),), needed_unless_multiple_of=4),
        GroupSpec("recurrent", Kind.RECURRENT, (4,), (tensor("state", 1, entry_axis=None),)),
    ),
    block_size=8,
    segment_tokens=16,
    snapshot_interval=16,
    vocab_size=VOCABULARY,
)


class Engine:
    """A manager and the arena that its plans and block tables speak of; for the thread that made it."""

    def __init__(self, device: str = "64KiB") -> None:
        self.manager = Manager(SPEC, [Device(device)], max_sequences=8, thread_id=threading.get_ident)
        self.arena = np.empty(self.manager.geometry.arena_bytes, dtype=np.uint8)  # never zeroed

    # ------------------------------------------------------------ bytes

    def view(self, group: int, slot: int, layer: int = 0, which: int = 0) -> np.ndarray:
        """One tensor of one layer in a slot; block groups have the entries at the tensor's ``entry_axis``."""
        spec = SPEC.groups[group]
        tensor, offset = spec.tensors[which], spec.tensor_offsets[which]
        at = self.manager.geometry.slot_offset(group, slot) + layer * spec.layer_stride + offset
        shape = list(tensor.shape)
        if tensor.entry_axis is not None:
            shape.insert(tensor.entry_axis, spec.block_entries)
        size = tensor.entry_bytes * spec.block_entries
        return self.arena[at : at + size].view(tensor.dtype).reshape(shape)

    def run(self, plan: CopyPlan) -> None:
        """Make the copies of a plan, in order, and report them; an empty plan is nothing to do."""
        for group, source, target, first_zero in zip(plan.group, plan.src, plan.dst, plan.entries, strict=True):
            spec, geometry = SPEC.groups[group], self.manager.geometry
            size, to = spec.slot_bytes, geometry.slot_offset(group, target)
            if source < 0:
                self.arena[to : to + size] = 0
            else:
                at = geometry.slot_offset(group, source)
                self.arena[to : to + size] = self.arena[at : at + size]
            if first_zero >= 0:  # a sealed copy of a part-filled block
                for layer in range(len(spec.layers)):
                    for which, one in enumerate(spec.tensors):
                        np.moveaxis(self.view(group, target, layer, which), one.entry_axis, 0)[first_zero:] = 0
        self.manager.complete(plan)

    def entry(self, sequence: CachedSequence, group: int, index: int, layer: int = 0, which: int = 0) -> np.ndarray:
        """Entry ``index`` (token ``index * ratio``) of one tensor: the block table is a ring of slots."""
        spec, table = SPEC.groups[group], sequence.block_table(group)
        block, within = divmod(index, spec.block_entries)
        content = self.view(group, table[block % len(table)], layer, which)
        return np.moveaxis(content, spec.tensors[which].entry_axis, 0)[within]

    # ------------------------------------------------------------ the model

    def forward(self, sequence: CachedSequence, tokens: np.ndarray) -> int:
        """Write the state of reserved tokens, reading nothing but the arena; returns the next token."""
        pending = self.view(PENDING, sequence.live_slot(PENDING))
        state = self.view(RECURRENT, sequence.live_slot(RECURRENT))
        for position, token in enumerate(tokens.tolist(), start=sequence.length):
            state[0] = (state[0] * 31 + token + 1) % 1_000_003
            for layer in (0, 1):
                self.entry(sequence, FULL, position, layer)[:] = [[token + layer], [position]]
            self.entry(sequence, WINDOW, position, which=0)[:] = token * 7
            self.entry(sequence, WINDOW, position, which=1)[:] = token * 11
            pending[position % 4] = token
            if position % 4 == 3:
                self.entry(sequence, POOLED, position // 4)[:] = pending @ [1, 50, 2500, 125_000]
                pending[:] = 0
        end = sequence.length + len(tokens)
        seen = int(state[0] + pending @ [1, 2, 3, 4])
        for group, first in ((FULL, 0), (POOLED, 0), (WINDOW, max(0, end - 12))):
            for layer in range(len(SPEC.groups[group].layers)):
                for which in range(len(SPEC.groups[group].tensors)):
                    for index in range(first, end // SPEC.groups[group].ratio):
                        seen += (index + 1) * int(self.entry(sequence, group, index, layer, which).sum())
        return seen % VOCABULARY

    # ------------------------------------------------------------ requests

    def open(self, prompt: np.ndarray, **options) -> CachedSequence:
        """Lease the longest cached prefix and restore what is copied for it."""
        sequence = self.manager.open(prompt, **options)
        self.run(sequence.restore)
        return sequence

    def extend(self, sequence: CachedSequence, tokens: np.ndarray) -> int:
        """append -> compute -> commit; returns the next token."""
        self.run(sequence.append(tokens))
        try:
            answer = self.forward(sequence, tokens)
        except BaseException:
            sequence.rollback()  # live state may be half written: the sequence is broken and can only be closed
            raise
        self.run(sequence.commit())
        return answer

    def prefill(self, sequence: CachedSequence, prompt: np.ndarray) -> int:
        """Compute what is missing, in canonical chunks; the last token is its own forward.  Returns the next token."""
        end = len(prompt) - 1
        while sequence.length < end:
            boundary = (sequence.length // SPEC.segment_tokens + 1) * SPEC.segment_tokens
            self.extend(sequence, prompt[sequence.length : min(end, boundary)])
        self.run(sequence.checkpoint())  # the next prompt that begins like this one resumes here
        return self.extend(sequence, prompt[end:])

    def decode(self, sequences: list[CachedSequence], tokens: list[int], steps: int) -> list[list[int]]:
        """Greedy decode of a batch, one call of the manager per step; returns the tokens after ``tokens``."""
        batch, answers = self.manager.batch(sequences), [[] for _ in sequences]
        for _ in range(steps):
            for plan in self.manager.step(batch, np.array(tokens, dtype=np.int32)):  # commits the step before
                self.run(plan)
            tokens = [self.forward(s, np.array([t])) for s, t in zip(sequences, tokens, strict=True)]
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        for plan in self.manager.finish(batch):  # commits the last step
            self.run(plan)
        return answers

    def close(self, sequence: CachedSequence) -> None:
        """Keep the exact end resumable and give everything back."""
        self.run(sequence.checkpoint())
        sequence.close()


def main() -> None:
    """Three requests about one document, each beside an engine whose cache is empty."""
    engine, cold = Engine(), Engine()
    document = np.random.default_rng(0).integers(0, VOCABULARY, 100)
    for name, question in (("first", [1, 2, 3]), ("second", [4, 5]), ("third", [4, 5])):
        prompt = np.concatenate([document, question])
        warm, fresh = engine.open(prompt), cold.open(prompt)
        print(f"{name}: {warm.explanation}")
        pair = [(e, s, e.prefill(s, prompt)) for e, s in ((engine, warm), (cold, fresh))]
        answers = [e.decode([s], [first], 8)[0] for e, s, first in pair]
        print(f"  answer {answers[0]}, {'the same' if answers[0] == answers[1] else 'NOT the same'} as cold")
        engine.close(warm)
        fresh.close()
        cold.manager.clear()


if __name__ == "__main__":
    main()
