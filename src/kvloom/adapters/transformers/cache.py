"""The ``Cache`` that models and ``generate`` take: one layer object per model layer, over one sequence's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvloom.adapters.transformers.block_table import Flight
from kvloom.adapters.transformers.layers import (
    PagedFullLayer,
    PagedIndexedLayer,
    PagedSlidingLayer,
    Parts,
    refuse,
)
from kvloom.adapters.transformers.recurrent import PagedHybridLayer, PagedHybridSlidingLayer, PagedLinearLayer
from kvloom.errors import SpecError
from kvloom.spec.model_spec import TensorSpec

if TYPE_CHECKING:
    from kvloom.adapters.transformers.runner import Runner


class State(Protocol):
    """Where the tensors of a sequence lie."""

    def parts(self, tensors: dict[str, tuple[int, int, TensorSpec]]) -> Parts:
        """All tensors of one layer, given its entry of ``state.places``."""


LayerClass = Callable[[Parts, Flight, Any], Any]

_CLASSES: dict[type, LayerClass] = {
    DynamicLayer: PagedFullLayer,
    DynamicSlidingWindowLayer: PagedSlidingLayer,
    DynamicIndexedLayer: PagedIndexedLayer,
    LinearAttentionLayer: PagedLinearLayer,
    LinearAttentionAndFullAttentionLayer: PagedHybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: PagedHybridSlidingLayer,
}


def layer_class(template: Any) -> LayerClass:
    """The kvloom layer that stands in for a layer of transformers' own cache; SpecError for one not understood."""
    kind = type(template)
    if kind in _CLASSES:
        return _CLASSES[kind]
    if kind.__name__ in ("DeepseekV4HCACache", "DeepseekV4CSACache"):
        from kvloom.adapters.transformers.deepseek_v4 import PagedCSALayer, PagedHCALayer

        return PagedCSALayer if kind.__name__ == "DeepseekV4CSACache" else PagedHCALayer
    raise SpecError(f"cache layer class {kind.__name__} is not understood, so its state cannot be kept")


class LayerPlan:
    """How to make the layers of a model's caches: one template layer of transformers' own and its tensors each."""

    def __init__(self, config: Any, tensors: dict[int, dict[str, tuple[int, int, TensorSpec]]]) -> None:
        self.templates = DynamicCache(config=config).layers
        self._tensors = tensors
        for index, template in enumerate(self.templates):
            if isinstance(template, DummyLayer) is (index in tensors):
                what = "keeps nothing" if index in tensors else f"is a {type(template).__name__}"
                names = sorted(tensors.get(index, {}))
                raise SpecError(
                    f"layer {index}: in transformers it {what}, but the spec has {names}; the model is not understood"
                )
            if index in tensors:
                layer_class(template)

    def make(self, state: State, flight: Flight) -> list[Any]:
        """New layers over a sequence's state."""
        layers: list[Any] = []
        for index, template in enumerate(self.templates):
            if isinstance(template, DummyLayer):
                layers.append(DummyLayer())
            else:
                layers.append(layer_class(template)(state.parts(self._tensors[index]), flight, template))
        return layers


class PagedCache(Cache):
    """A session's state as a transformers cache.  Made by :meth:`Engine.open`.

    One sequence only.  What would need several, or a way back, raises UnsupportedError and changes nothing:
    beams, batches, ``crop``, assisted decoding, offloading, pickling.  ``copy.deepcopy`` forks the sequence; the
    fork is closed when the copy is dropped.

    Attributes:
        runner: what drives the sequence.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        super().__init__(layers=runner.layers)

    @property
    def layers(self) -> list[Any]:
        """One object for every layer of the model; outside a forward, once all of their state is there."""
        self.runner.settle_outside()
        return self.runner.layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        if layers is not self.runner.layers:
            refuse("exchanging layers", "open a session for each cache")

    @property
    def is_compileable(self) -> bool:
        """False: blocks move from step to step."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of state before the forward in progress; right also after a forward that was cut off."""
        self.runner.settle_outside()
        return self.runner.length

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state that a layer goes on from, to be updated in place: SequenceError outside a forward of the model."""
        self.runner.flight.require()
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state that a layer goes on from, to be updated in place: SequenceError outside a forward of the model."""
        self.runner.flight.require()
        state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def crop(self, tokens_to_remove: int) -> None:
        """UnsupportedError, unless there is nothing to remove."""
        if tokens_to_remove:
            refuse("crop", "open a session for the shorter token sequence: its prefix is reused")

    def reorder_cache(self, beam_idx: Any) -> None:
        """UnsupportedError."""
        refuse("reordering beams", "use one sequence per session (num_beams=1)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """UnsupportedError."""
        refuse("repeating the batch", "fork the session once per sequence")

    def batch_select_indices(self, indices: Any) -> None:
        """UnsupportedError."""
        refuse("selecting from the batch", "use one sequence per session")

    def activate_past_recording(self) -> None:
        """UnsupportedError: assisted decoding takes tokens back."""
        refuse("recording past states for a rollback", "turn assisted decoding off, or use DynamicCache with it")

    def early_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: every state has its place."""

    def reset(self) -> None:
        """UnsupportedError."""
        refuse("reset", "close the session and open another")

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork: the same state, continued apart."""
        fork = memo[id(self)] = PagedCache(self.runner.fork())
        return fork

    def __copy__(self) -> NoReturn:
        refuse("a shallow copy", "use copy.deepcopy or Session.fork")

    def __reduce__(self) -> NoReturn:
        refuse("pickling", "the state lies in the arena of a running process")
