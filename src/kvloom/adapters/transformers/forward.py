"""The one way in which kvloom, and the cold runs it is compared with, call a model on a chunk of tokens.

A canonical hit is bit-equal to a cold run only if both make the same calls: same chunk, same explicit
position ids (some models restart at 0 without them), no attention mask, logits of the last token only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


@functools.cache
def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward takes a keyword called ``argument`` by name."""
    return argument in _arguments_of(type(model).forward)


def forward_chunk(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, start: int, *, logits_to_keep: int = 1
) -> torch.Tensor:
    """Run ``ids`` (int64, ``[1, q]``), the tokens of positions [start, start + q), on ``cache``.

    Returns the logits of the last ``logits_to_keep`` tokens (0: of all), ``[1, kept, vocab]`` in the dtype
    of the model.  Gradients are off by ``no_grad`` and not by ``inference_mode``: state that a layer creates
    here must stay writable in place for a caller that goes on in ``generate``.
    """
    count = ids.shape[1]
    arguments: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    if accepts(model, "position_ids"):
        arguments["position_ids"] = torch.arange(start, start + count, device=ids.device).unsqueeze(0)
    if accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = logits_to_keep
    gradients = torch.is_grad_enabled()
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(**arguments).logits
    finally:  # an interrupt between the lines of no_grad itself would leave them off for good
        torch.set_grad_enabled(gradients)
    return logits[:, -logits_to_keep:] if logits_to_keep else logits
