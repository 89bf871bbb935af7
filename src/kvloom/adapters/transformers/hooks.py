"""Forward hooks: what the model is about to compute is reserved before it runs and published after it ran."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvloom.adapters.transformers.cache import PagedCache
from kvloom.errors import UnsupportedError

_CACHE_NAMES = ("past_key_values", "cache_params")
_NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "image_embeds")


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedCache | None:
    """The PagedCache among the arguments of a forward, or None."""
    cache = kwargs.get("past_key_values")
    if type(cache) is PagedCache:
        return cache
    if cache is None:
        for value in (*args, kwargs.get("cache_params")):
            if type(value) is PagedCache:
                return value
    return None


class ForwardHooks:
    """The two hooks on one model; they do nothing for calls with another cache.

    Attributes:
        removed: True once they are off the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.removed = False
        self._handles: tuple[RemovableHandle, ...] = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.removed = True
        for handle in self._handles:
            handle.remove()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = find_cache(args, kwargs)
        if cache is not None:
            runner = cache.runner
            if runner.engine.hooks is not self and runner.engine.model is module:
                return  # another engine's session on the same model: its own hooks see this call too
            if runner.engine.model is not module:
                raise UnsupportedError(
                    "this cache belongs to a session of another model; "
                    "open a session on the engine of the model that you call"
                )
            runner.begin_forward()
            ids = kwargs.get("input_ids", args[0] if args else None)
            runner.take_off(_checked_ids(ids, kwargs, runner.length, training=module.training))

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = find_cache(args, kwargs)
        if cache is not None and cache.runner.engine.hooks is self and cache.runner.flight.end >= 0:
            if output is None:  # the forward raised
                cache.runner.abort()
            else:
                cache.runner.land()


def _checked_ids(ids: Any, kwargs: dict[str, Any], length: int, *, training: bool) -> torch.Tensor:
    """The ids ``[q]`` of a forward; UnsupportedError for anything that the cached state could not be reused with."""
    if training:
        raise UnsupportedError("the model is in training mode, so its state is random; call model.eval() first")
    if kwargs.get("inputs_embeds") is not None or not isinstance(ids, torch.Tensor):
        raise UnsupportedError("kvloom identifies state by token ids; pass input_ids, not inputs_embeds")
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise UnsupportedError(
            f"input_ids have the shape {list(ids.shape)}, but a session is one sequence, [1, n]: "
            "no batches, beams or several returned sequences; use one session per sequence"
        )
    for name in _NOT_TEXT:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{name} change the state, but a session is known by its token ids alone, so its state could be reused "
                "for other input; call the model without them, or without kvloom's cache"
            )
    mask = kwargs.get("attention_mask")
    if mask is not None:
        _check_mask(mask)
    positions = kwargs.get("position_ids")
    if positions is not None:
        _check_positions(positions, length, ids.shape[1])
    return ids[0]


def _check_mask(mask: Any) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise UnsupportedError(
            "the attention mask is not a [1, n] mask of ones: a ready-made one changes the state, but a session is "
            "known by its token ids alone; leave the mask out"
        )
    if not bool(mask.all()):
        raise UnsupportedError("the attention mask hides tokens (padding); one session is one sequence without padding")


def _check_positions(positions: Any, length: int, count: int) -> None:
    if not isinstance(positions, torch.Tensor):
        raise UnsupportedError(f"position ids must be a tensor, not {type(positions).__name__}; or leave them out")
    if count == 1:
        right = positions.numel() == 1 and int(positions) == length
        right = right or bool((positions == length).all())
    else:
        expected = torch.arange(length, length + count, device=positions.device)
        right = positions.shape[-1] == count and bool((positions == expected).all())
    if not right:
        raise UnsupportedError(
            f"position ids must be {length} to {length + count - 1}, where the session stands; if the prompt passed to "
            "generate is not the one that the session was opened with, open another session"
        )
