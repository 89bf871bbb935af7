"""DeepSeek-V4 cache layers: window, compressed entries, pending rows and overlap, all in kvloom's slots.

How many entries and pending rows there are follows from the position alone, so the layers keep no
counters of their own: at position P there are ``P // ratio`` entries and ``P % ratio`` pending rows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from kvloom.adapters.transformers.block_table import Flight
from kvloom.adapters.transformers.layers import Parts, WindowMixin
from kvloom.adapters.transformers.paged_tensor import PagedTensor
from kvloom.errors import SequenceError

Named = dict[str, torch.Tensor | None]


class CompressingMixin(WindowMixin):
    """Everything that HCA and CSA layers share.

    Attributes:
        compress_rate: tokens per compressed entry.
    """

    _layer_type = None  # transformers registers a class for the layer type otherwise
    names: tuple[str, ...] = ("compressor",)

    def __init__(self, parts: Parts, flight: Flight, template: Any) -> None:
        self._bind_window(parts, flight, template)
        self.compress_rate: int = template.compress_rate
        self._entries: dict[str, PagedTensor] = {}
        self._pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in self.names:
            entries = parts[f"compressed_kv.{name}"]
            assert isinstance(entries, PagedTensor)
            self._entries[name] = entries
            self._pending[name] = pair(parts, "buffer", name)

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Put new rows ``[1, q, width]`` behind the pending ones.

        Returns the rows of all entries that are complete now (kv and gate) and the position of the first;
        the rest stays pending.
        """
        ratio, start = self.compress_rate, self.flight.start
        self.flight.check(start + kv.shape[1])
        held = start % ratio
        new = (kv, gate)
        if held:
            old = self._pending[name]
            kv = torch.cat([old[0].narrow(1, 0, held), kv], dim=1)
            gate = torch.cat([old[1].narrow(1, 0, held), gate], dim=1)
        usable = kv.shape[1] // ratio * ratio
        rest = kv.shape[1] - usable
        for place, rows, fresh in zip(self._pending[name], (kv, gate), new, strict=True):
            if place.dtype is not rows.dtype:
                raise SequenceError(f"the model makes {rows.dtype} rows now, not {place.dtype} as before; attach again")
            if not usable:
                place.narrow(1, held, fresh.shape[1]).copy_(fresh.detach())
            elif rest:
                place.narrow(1, 0, rest).copy_(rows.detach().narrow(1, usable, rest))
        return kv[:, :usable], gate[:, :usable], start // ratio * ratio

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Append new entries ``[1, n, dim]``; return all of them."""
        before, after = self.flight.start // self.compress_rate, self.flight.end // self.compress_rate
        if compressed.shape[1] != after - before:
            raise SequenceError(
                f"the model made {compressed.shape[1]} compressed entries where {after - before} are due; attach again"
            )
        if after == 0:
            return compressed
        entries = self._entries[name]
        return entries.extend(before, compressed, 0) if after > before else entries.gather(0, after)

    @property
    def entry_count(self) -> dict[str, int]:
        """Compressed entries so far, by owner."""
        return dict.fromkeys(self.names, self.cumulative_length // self.compress_rate)

    @property
    def compressed_kv(self) -> Named:
        """Copies of all entries, by owner; None before the first token."""
        count = self.cumulative_length // self.compress_rate
        return {n: self._entries[n].gather(0, count) if self.cumulative_length else None for n in self.names}

    @property
    def buffer_kv(self) -> Named:
        """Copies of the pending rows, by owner; None before the first token."""
        return self._copies(0)

    @property
    def buffer_gate(self) -> Named:
        """Copies of the gates of the pending rows, by owner; None before the first token."""
        return self._copies(1)

    def _copies(self, which: int) -> Named:
        rows = self.cumulative_length % self.compress_rate
        seen = self.cumulative_length > 0
        return {n: self._pending[n][which].narrow(1, 0, rows).clone() if seen else None for n in self.names}

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`~kvloom.adapters.transformers.layers.PagedLayerMixin`."""
        named = {"compressed_kv": self.compressed_kv, "buffer_kv": self.buffer_kv, "buffer_gate": self.buffer_gate}
        return super().state() | flatten(named)


class PagedHCALayer(CompressingMixin, DeepseekV4HCACache):
    """Heavily compressed attention."""

    _layer_type = None


class PagedCSALayer(CompressingMixin, DeepseekV4CSACache):
    """Compressed sparse attention: a second set of states for the indexer, and overlap."""

    _layer_type = None
    names = ("compressor", "indexer")

    def __init__(self, parts: Parts, flight: Flight, template: Any) -> None:
        super().__init__(parts, flight, template)
        self._overlap = {name: pair(parts, "overlap", name) for name in self.names}

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keep the Ca half of the last complete group; return the one kept before (None for the first)."""
        kv, gate = self._overlap[name]
        seen = self.flight.start >= self.compress_rate
        prior = (kv.clone(), gate.clone()) if seen else (None, None)
        for place, chunk in ((kv, chunk_kv), (gate, chunk_gate)):
            if place.dtype is not chunk.dtype:
                raise SequenceError(
                    f"the model makes {chunk.dtype} overlap now, not {place.dtype} as before; attach again"
                )
            place.copy_(chunk.detach()[:, -1, :, :head_dim])
        return prior

    @property
    def overlap_kv(self) -> Named:
        """Copies of the overlap rows, by owner; None while no entry is complete."""
        return self._overlap_copies(0)

    @property
    def overlap_gate(self) -> Named:
        """Copies of the gates of the overlap rows, by owner; None while no entry is complete."""
        return self._overlap_copies(1)

    def _overlap_copies(self, which: int) -> Named:
        seen = self.cumulative_length >= self.compress_rate
        return {n: self._overlap[n][which].clone() if seen else None for n in self.names}

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`~kvloom.adapters.transformers.layers.PagedLayerMixin`."""
        return super().state() | flatten({"overlap_kv": self.overlap_kv, "overlap_gate": self.overlap_gate})


def pair(parts: Parts, what: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The kv and gate tensors ``[1, rows, width]`` called ``what_kv.name`` and ``what_gate.name``."""
    kv, gate = parts[f"{what}_kv.{name}"], parts[f"{what}_gate.{name}"]
    assert isinstance(kv, torch.Tensor)
    assert isinstance(gate, torch.Tensor)
    return kv, gate


def flatten(states: dict[str, Named]) -> dict[str, torch.Tensor]:
    """``{"a": {"b": t}}`` as ``{"a.b": t}``, without what is None."""
    return {f"{what}.{name}": t for what, named in states.items() for name, t in named.items() if t is not None}
