"""Attention cache layers over kvloom's blocks: full, sliding, chunked and indexed.

Each subclasses transformers' own layer class, because model code asks for the class and calls its
methods; the state lies in the sequence's slots, and ``keys`` / ``values`` are fresh copies, made on request.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from kvloom.adapters.transformers.block_table import Flight
from kvloom.adapters.transformers.paged_tensor import PagedTensor
from kvloom.errors import UnsupportedError

Parts = dict[str, "PagedTensor | torch.Tensor"]
"""State of one layer by tensor name: paged (block groups) or a view of the live slot (snapshot groups)."""


def refuse(operation: str, instead: str) -> NoReturn:
    """Raise UnsupportedError for a cache operation that kvloom does not offer."""
    raise UnsupportedError(f"{operation} is not possible on a kvloom cache; {instead}")


class PagedLayerMixin:
    """What every layer refuses, and how its counters follow the sequence.

    Attributes:
        flight: the forward in progress, shared by all layers of a sequence.
        cumulative_length: tokens that this layer has seen.
    """

    is_croppable = False
    is_compileable = False
    flight: Flight
    cumulative_length: int

    def _begin(self, flight: Flight) -> None:
        self.flight = flight
        self.cumulative_length = 0
        self.is_initialized = False
        self.record_past = False

    def sync(self, length: int) -> None:
        """Set the counters to ``length`` tokens of state (after a restore or a rollback)."""
        self.cumulative_length = length
        self.is_initialized = length > 0

    def state(self) -> dict[str, torch.Tensor]:
        """Every state tensor by the name and in the shape that transformers' own layer gives it."""
        raise NotImplementedError

    def get_seq_length(self) -> int:
        """Tokens that this layer has seen."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """UnsupportedError, unless there is nothing to remove."""
        if tokens_to_remove:
            refuse("crop", "open a session for the shorter token sequence: its prefix is reused")

    def reorder_cache(self, _beam_idx: Any) -> None:
        """UnsupportedError."""
        refuse("reordering beams", "use one sequence per session (num_beams=1)")

    def batch_repeat_interleave(self, _repeats: int) -> None:
        """UnsupportedError."""
        refuse("repeating the batch", "fork the session once per sequence")

    def batch_select_indices(self, _indices: Any) -> None:
        """UnsupportedError."""
        refuse("selecting from the batch", "use one sequence per session")

    def activate_past_recording(self) -> None:
        """UnsupportedError."""
        refuse("recording past states for a rollback", "turn assisted decoding off, or use DynamicCache with it")

    def offload(self) -> None:
        """UnsupportedError."""
        refuse("offloading", "kvloom places state by itself")

    def prefetch(self) -> None:
        """UnsupportedError."""
        refuse("prefetching", "kvloom places state by itself")

    def reset(self) -> None:
        """UnsupportedError."""
        refuse("reset", "close the session and open another")


class KeysMixin(PagedLayerMixin):
    """Keys and values in blocks; a layer whose spec has no ``values`` keeps one tensor that is both."""

    _keys: PagedTensor
    _values: PagedTensor | None

    def _bind(self, parts: Parts, flight: Flight) -> None:
        keys, values = parts["keys"], parts.get("values")
        assert isinstance(keys, PagedTensor)
        assert values is None or isinstance(values, PagedTensor)
        self._keys, self._values = keys, values
        self.dtype = keys.dtype
        self._begin(flight)

    def _kept(self, length: int) -> tuple[int, int, int]:
        """(first row, end, dead rows before it) that are cached at ``length``."""
        return 0, length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new rows ``[1, heads, q, dim]``; return what attention reads: the cached rows and the new ones."""
        start = self.cumulative_length
        end = start + key_states.shape[-2]
        self.flight.check(end)
        begin, _end, dead = self._kept(start)
        keys = self._keys.extend(start, key_states, begin, dead)
        values = keys if self._values is None else self._values.extend(start, value_states, begin, dead)
        self.cumulative_length = end
        self.is_initialized = True
        return keys, values

    @property
    def keys(self) -> torch.Tensor | None:
        """The cached rows, a copy; None while there are none."""
        return self._keys.gather(*self._kept(self.cumulative_length)) if self.cumulative_length else None

    @property
    def values(self) -> torch.Tensor | None:
        """The cached rows, a copy; None while there are none."""
        if self._values is None:
            return self.keys
        return self._values.gather(*self._kept(self.cumulative_length)) if self.cumulative_length else None

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`PagedLayerMixin`."""
        keys, values = self.keys, self.values
        return {} if keys is None or values is None else {"keys": keys, "values": values}


class WindowMixin(KeysMixin):
    """Keys and values of which only the last ``sliding_window - 1`` rows stay.

    A chunked layer keeps the rows of the current chunk only: transformers still hands attention the rows
    before it, always masked, and here they are zeros.
    """

    sliding_window: int
    chunked: bool

    def _bind_window(self, parts: Parts, flight: Flight, template: Any) -> None:
        self._bind(parts, flight)
        self.sliding_window = template.sliding_window
        self.chunked = self._keys.group.chunked
        self._sliding_window_tensor = template._sliding_window_tensor

    def _kept(self, length: int) -> tuple[int, int, int]:
        begin = max(0, length - self.sliding_window + 1)
        if not self.chunked:
            return begin, length, 0
        alive = max(begin, length - length % self.sliding_window)
        return alive, length, alive - begin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(KV length, position of the first KV row) for a forward of ``query_length`` tokens."""
        seen, window = self.cumulative_length, self.sliding_window
        return min(seen, window - 1) + query_length, max(seen - window + 1, 0)


class PagedFullLayer(KeysMixin, DynamicLayer):
    """Full attention."""

    def __init__(self, parts: Parts, flight: Flight, _template: Any) -> None:
        self._bind(parts, flight)


class PagedSlidingLayer(WindowMixin, DynamicSlidingWindowLayer):
    """Sliding-window and chunked attention."""

    def __init__(self, parts: Parts, flight: Flight, template: Any) -> None:
        self._bind_window(parts, flight, template)


class PagedIndexedLayer(KeysMixin, DynamicIndexedLayer):
    """Full attention with the keys of a sparse-attention indexer.

    Layers that reuse the choice of another layer's indexer have no ``indexer_keys`` in their spec.
    """

    def __init__(self, parts: Parts, flight: Flight, _template: Any) -> None:
        indexer = parts.get("indexer_keys")
        assert indexer is None or isinstance(indexer, PagedTensor)
        self._indexer = indexer
        self._indexed = 0
        self._bind(parts, flight)

    def sync(self, length: int) -> None:
        """See :class:`PagedLayerMixin`."""
        super().sync(length)
        self._indexed = length if self._indexer is not None else 0

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store new indexer keys ``[1, q, dim]``; return all of them."""
        if self._indexer is None:
            refuse("an indexer on this layer", "its spec has no indexer keys")
        end = self._indexed + indexer_key_states.shape[1]
        self.flight.check(end)
        rows = self._indexer.extend(self._indexed, indexer_key_states, 0)
        self._indexed = end
        return rows

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether there are indexer keys."""
        return self._indexed > 0

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """All indexer keys, a copy; None while there are none."""
        return self._indexer.gather(0, self._indexed) if self._indexer is not None and self._indexed else None

    @property
    def indexer_position_ids(self) -> None:
        """Always None: models that keep positions for the indexer are refused."""
        return

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Any) -> None:
        if value is not None:
            refuse("keeping positions for the indexer", "this state is not understood")

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`PagedLayerMixin`."""
        indexer = self.indexer_keys
        return super().state() | ({} if indexer is None else {"indexer_keys": indexer})
