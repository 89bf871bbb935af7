"""Cache layers with recurrent state: its tensors are views of the sequence's live slot, updated in place.

transformers' own update methods copy into the state tensor that they find, so only the tensors are placed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvloom.adapters.transformers.block_table import Flight
from kvloom.adapters.transformers.layers import KeysMixin, PagedLayerMixin, Parts, WindowMixin
from kvloom.errors import SequenceError


class RecurrentMixin(PagedLayerMixin):
    """``conv_states`` and ``recurrent_states`` in the live slot."""

    def _bind_states(self, parts: Parts, flight: Flight, template: Any) -> None:
        self.flight = flight
        self.number_of_states = template.number_of_states
        indices = range(template.number_of_states)
        self.conv_states = {i: parts.get(f"conv_states.{i}") for i in indices}
        self.recurrent_states = {i: parts.get(f"recurrent_states.{i}") for i in indices}
        self.is_conv_states_initialized = {i: self.conv_states[i] is not None for i in indices}
        self.is_recurrent_states_initialized = {i: self.recurrent_states[i] is not None for i in indices}
        self.conv_kernel_size = {i: t.shape[-1] for i, t in self.conv_states.items() if isinstance(t, torch.Tensor)}
        self.has_previous_state = dict.fromkeys(indices, False)
        any_state = next(t for t in parts.values() if isinstance(t, torch.Tensor))
        self.device, self.dtype = any_state.device, any_state.dtype

    def sync(self, length: int) -> None:
        """See :class:`PagedLayerMixin`."""
        super().sync(length)
        self.has_previous_state = dict.fromkeys(self.has_previous_state, length > 0)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """SequenceError: every state of the spec has its place already, so this one is not in the spec."""
        raise SequenceError("a layer made a recurrent state that its spec does not have; attach again")

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep the last inputs of the convolution in place; return them with the new ones in front."""
        self._check(self.conv_states[state_idx], conv_states)
        full: torch.Tensor = super().update_conv_state(conv_states.detach(), state_idx, **kwargs)  # type: ignore[misc]
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Copy the state into its place; return it."""
        self._check(self.recurrent_states[state_idx], recurrent_states)
        kept: torch.Tensor = super().update_recurrent_state(recurrent_states.detach(), state_idx, **kwargs)  # type: ignore[misc]
        return kept

    def _check(self, place: Any, new: torch.Tensor) -> None:
        self.flight.require()
        if place is None:
            raise SequenceError("a layer made a recurrent state that its spec does not have; attach again")
        if place.dtype is not new.dtype:
            raise SequenceError(f"a layer makes {new.dtype} state now, not {place.dtype} as before; attach again")

    def recurrent_state(self) -> dict[str, torch.Tensor]:
        """Copies of the states, by name; empty before the first token."""
        if not all(self.has_previous_state.values()):
            return {}
        states = {f"conv_states.{i}": t for i, t in self.conv_states.items()}
        states |= {f"recurrent_states.{i}": t for i, t in self.recurrent_states.items()}
        return {name: t.clone() for name, t in states.items() if isinstance(t, torch.Tensor)}


class PagedLinearLayer(RecurrentMixin, LinearAttentionLayer):
    """Linear attention, state-space or short convolution layer."""

    def __init__(self, parts: Parts, flight: Flight, template: Any) -> None:
        self._begin(flight)
        self._bind_states(parts, flight, template)

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`PagedLayerMixin`."""
        return self.recurrent_state()


class PagedHybridLayer(RecurrentMixin, KeysMixin, LinearAttentionAndFullAttentionLayer):
    """Recurrent state and full attention in one layer."""

    def __init__(self, parts: Parts, flight: Flight, template: Any) -> None:
        self._bind(parts, flight)
        self._bind_states(parts, flight, template)

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`PagedLayerMixin`."""
        return self.recurrent_state() | KeysMixin.state(self)


class PagedHybridSlidingLayer(RecurrentMixin, WindowMixin, LinearAttentionAndSlidingWindowAttentionLayer):
    """Recurrent state and sliding-window attention in one layer."""

    def __init__(self, parts: Parts, flight: Flight, template: Any) -> None:
        self._bind_window(parts, flight, template)
        self._bind_states(parts, flight, template)

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`PagedLayerMixin`."""
        return self.recurrent_state() | KeysMixin.state(self)
