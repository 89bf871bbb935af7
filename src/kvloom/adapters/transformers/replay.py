"""Windows and tails that were lost, made again by running a few tokens over the compressed state that was kept.

The layers are those of every session, over other memory: what they read of kept groups lies in the arena and is not
written (the model makes these rows again, and they are thrown away); windows and tails lie in memory of the replay,
which begins as zeros, and are copied slot by slot to where the plan wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from kvloom.adapters.transformers.block_table import BlockTable, Flight
from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.adapters.transformers.host_tensor import HostPagedTensor
from kvloom.adapters.transformers.layers import PagedLayerMixin, Parts
from kvloom.adapters.transformers.paged_tensor import PagedTensor, snapshot_view
from kvloom.adapters.transformers.state import TORCH_DTYPES
from kvloom.errors import InputError, UnsupportedError
from kvloom.plan import ArenaGeometry, TransferPlan
from kvloom.spec.model_spec import ModelSpec, TensorSpec
from kvloom.spec.replay import Span, replay_span
from kvloom.types import Int32Array

if TYPE_CHECKING:
    from kvloom.adapters.transformers.engine import Engine

ChunkTimer = Callable[[int, int, float], None]
"""Told of every forward: first token, tokens, seconds."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did.

    Attributes:
        good: bool ``[len(plan)]``, the objects that it wrote.
        tokens: tokens that it forwarded.
        forwards: calls of the model.
        seconds: by the engine's clock, on an accelerator with all that was queued.
    """

    good: npt.NDArray[np.bool_]
    tokens: int
    forwards: int
    seconds: float


class Replayer:
    """Runs replays on one engine, in its thread.

    Args:
        engine: whose model, arena and manager are used.
        clock: seconds, for ``Replayed.seconds``.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock

    def span(self, position: int, groups: tuple[int, ...] | None = None, *, exact: bool = True, skip: int = 0) -> Span:
        """The tokens that a replay for the boundary at ``position`` forwards, or why there is none.

        ``groups``: indices of the groups that are missing there, by default all windows and tails; ``exact``, ``skip``:
        see :func:`kvloom.spec.replay.replay_span`.
        """
        return replay_span(self._engine.spec, position, groups, exact=exact, skip=skip)

    def run(
        self,
        tokens: Int32Array,
        plan: TransferPlan,
        wanted: npt.NDArray[np.bool_],
        span: Span,
        tell: ChunkTimer | None = None,
    ) -> Replayed:
        """Compute the objects ``wanted`` (bool ``[len(plan)]``) of an open load into their slots.

        Everything else that the plan loads must have arrived.  Nothing that was kept is written.  The caller ends the
        load, with what is good, also when this raises.

        Args:
            tokens: int32, at least those up to the boundary.
            plan: an open load of the engine's manager.
            wanted: windows and tails only.
            span: what :meth:`span` said for this boundary.
            tell: told of every forward.

        Raises:
            InputError: the span is another boundary's or none, or more than windows and tails is wanted.
            UnsupportedError: the model is in training mode.
            SequenceError: the engine is closed, or the model makes other state than before.
        """
        engine = self._engine
        engine.require_open()
        if engine.model.training:
            raise UnsupportedError("the model is in training mode, so its state is random; call model.eval() first")
        if not span or span.position != plan.position or len(tokens) < plan.position:
            raise InputError(f"a replay for {plan.position} needs a span that ends there, and its tokens; not {span}")
        kept = engine.manager.colder.prefix_slots(plan)
        if any(len(kept[g]) for g in np.unique(plan.group[wanted]).tolist()):
            raise InputError("a replay makes windows and tails; what else is missing must be loaded")
        state = _ReplayState(engine, kept, span)
        cache = _ReplayCache(engine, state)
        segment, start, forwards, began = engine.spec.segment_tokens, span.start, 0, self._clock()
        while start < span.position:
            stop = min(span.position, (start // segment + 1) * segment)
            ids = torch.from_numpy(np.ascontiguousarray(tokens[start:stop])).to(engine.model.device, torch.int64)
            before = self._clock()
            cache.begin(start, stop)
            with nullcontext() if engine.cold is None else engine.cold.pace.forward():
                forward_chunk(engine.model, ids.unsqueeze(0), cache, start)
            if tell is not None:
                engine.arena.settle()
                tell(start, stop - start, self._clock() - before)
            start, forwards = stop, forwards + 1
        state.write(plan, wanted)
        engine.arena.settle()
        return Replayed(wanted.copy(), span.tokens, forwards, self._clock() - began)


class _KeptTensor(PagedTensor):
    """Rows that are there already: what is written to them is thrown away."""

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Check the rows only."""
        self._checked(rows)

    def extend(self, start: int, rows: torch.Tensor, begin: int, dead: int = 0) -> torch.Tensor:
        """The kept rows in place of the new ones."""
        self._checked(rows)
        return self.gather(begin, start + rows.shape[self.dim], dead)


class _HostKeptTensor(_KeptTensor, HostPagedTensor):
    """See :class:`_KeptTensor`."""


class _Blocks:
    """One group's blocks, as a ``Sequence`` of one: slots by logical block, those in [first, last) in use."""

    def __init__(self, slots: Int32Array) -> None:
        self.slots = slots
        self.first = self.last = 0

    def block_table(self, _group: int) -> Int32Array:
        """See :class:`~kvloom.adapters.transformers.block_table.Sequence`."""
        return self.slots

    def first_block(self, _group: int) -> int:
        """See :class:`~kvloom.adapters.transformers.block_table.Sequence`."""
        return self.first

    def num_blocks(self, _group: int) -> int:
        """See :class:`~kvloom.adapters.transformers.block_table.Sequence`."""
        return self.last

    def published_blocks(self, _group: int) -> int:
        """See :class:`~kvloom.adapters.transformers.block_table.Sequence`."""
        return 0

    def live_slot(self, _group: int) -> int:
        """See :class:`~kvloom.adapters.transformers.block_table.Sequence`."""
        return int(self.slots[0])


class _ReplayState:
    """Where the layers of a replay read and write: kept groups in the arena, the others in memory of its own."""

    def __init__(self, engine: Engine, kept: tuple[Int32Array, ...], span: Span) -> None:
        self._spec, self._arena, self._geometry = engine.spec, engine.arena, engine.manager.geometry
        self._own = _own_geometry(engine.spec, span)
        self._memory = torch.zeros(self._own.arena_bytes, dtype=torch.uint8, device=engine.model.device)
        self._blocks: dict[int, _Blocks] = {}
        self._tables: dict[int, BlockTable] = {}
        for g, group in enumerate(engine.spec.groups):
            own = self._own.num_slots[g] > 0
            slots = np.arange(self._own.num_slots[g], dtype=np.int32) if own else kept[g]
            blocks = self._blocks[g] = _Blocks(slots)
            if not group.is_snapshot:
                self._tables[g] = BlockTable(blocks, g, group, self._own if own else self._geometry)

    def parts(self, tensors: dict[str, tuple[int, int, TensorSpec]]) -> Parts:
        """All tensors of one layer."""
        return {name: self._part(*place) for name, place in tensors.items()}

    def _part(self, g: int, layer: int, tensor: TensorSpec) -> PagedTensor | torch.Tensor:
        dtype, scratch = TORCH_DTYPES[tensor.dtype], self._arena.scratch
        group = self._spec.groups[g]
        if group.is_snapshot:
            return snapshot_view(self._memory.view(dtype), self._own.slot_offset(g, 0), group, layer, tensor)
        if self._own.num_slots[g] > 0:
            base = self._memory.view(dtype)
            if scratch is None:
                return PagedTensor(self._tables[g], base, layer, tensor)
            return HostPagedTensor(self._tables[g], base, layer, tensor, scratch)
        if scratch is None:
            return _KeptTensor(self._tables[g], self._arena.base(dtype), layer, tensor)
        return _HostKeptTensor(self._tables[g], self._arena.base(dtype), layer, tensor, scratch)

    def begin(self, start: int, end: int) -> None:
        """The tokens [start, end) are next: what of the own blocks is new becomes zeros."""
        for g, table in self._tables.items():
            group, blocks = self._spec.groups[g], self._blocks[g]
            last = -(-(end // group.ratio) // group.block_entries)
            if self._own.num_slots[g] > 0:
                first = max(0, start - group.window + 1) // group.block_tokens
                for block in range(max(blocks.last, first), last):
                    self._slot(g, block).zero_()
                blocks.first = first
            blocks.last = last
            table.refresh()

    def _slot(self, g: int, block: int) -> torch.Tensor:
        """The bytes of an own block; of a snapshot whatever ``block`` is."""
        at = self._own.slot_offset(g, block % int(self._own.num_slots[g]))
        return self._memory[at : at + self._spec.groups[g].slot_bytes]

    def write(self, plan: TransferPlan, wanted: npt.NDArray[np.bool_]) -> None:
        """Copy what was made to the slots of the plan."""
        segment = self._spec.segment_tokens
        for i in np.flatnonzero(wanted).tolist():
            g, group = int(plan.group[i]), self._spec.groups[int(plan.group[i])]
            block = 0
            if not group.is_snapshot:
                block = int(plan.row[i]) * (segment // group.block_tokens) + int(plan.column[i])
            to = self._geometry.slot_offset(g, int(plan.slot[i]))
            self._arena.bytes[to : to + group.slot_bytes].copy_(self._slot(g, block))


class _ReplayCache(Cache):
    """A cache for the forwards of a replay; the engine's hooks take no notice of it."""

    def __init__(self, engine: Engine, state: _ReplayState) -> None:
        self._state, self._flight = state, Flight(engine.hooks)
        layers: list[Any] = engine.layers.make(state, self._flight)
        super().__init__(layers=layers)
        self._start = 0
        self._fresh = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the forward in progress."""
        return self._start

    def begin(self, start: int, end: int) -> None:
        """The next forward computes the tokens [start, end)."""
        self._state.begin(start, end)
        self._start, self._flight.start, self._flight.end = start, start, end
        if self._fresh:
            for layer in self.layers:
                if isinstance(layer, PagedLayerMixin):
                    layer.sync(start)
            self._fresh = False


def _own_geometry(spec: ModelSpec, span: Span) -> ArenaGeometry:
    """Slots for windows, as a ring that is long enough for one forward and for what is kept at the end, and tails."""
    counts, sizes = np.zeros((2, len(spec.groups)), dtype=np.int64)
    for g, group in enumerate(spec.groups):
        sizes[g] = group.slot_bytes
        if group.is_snapshot:
            counts[g] = 1
        elif group.window:
            first = max(0, span.start - group.window + 1) // group.block_tokens
            blocks = -(-span.position // group.block_tokens) - first
            most = -(-(group.window + spec.segment_tokens) // group.block_tokens) + 1
            counts[g] = min(blocks, most)
    pages = counts * sizes
    return ArenaGeometry(
        int(pages.sum()),
        np.cumsum(pages) - pages,
        np.maximum(pages, 256),
        np.maximum(counts, 1),
        sizes,
        counts,
        static_split=True,
    )
