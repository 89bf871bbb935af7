"""Token ids as users have them, checked, as the manager takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvloom.errors import InputError
from kvloom.types import Int32Array


def to_tokens(ids: Any, *, vocab_size: int = 0, max_positions: int = 0) -> Int32Array:
    """Token ids as int32 ``[n]``.

    Args:
        ids: list, NumPy array or torch tensor of integers, ``[n]`` or ``[1, n]``.
        vocab_size: ids must be below it; 0: not known.
        max_positions: there must be no more ids than this; 0: not known.

    Raises:
        InputError: what is wrong, and where.
    """
    if isinstance(ids, torch.Tensor):
        array = ids.detach().cpu().numpy() if ids.dtype is not torch.bfloat16 else ids.detach().float().cpu().numpy()
    else:
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as error:
            raise InputError(f"token ids cannot be read as an array: {error}") from None
    if array.size == 0:
        raise InputError("token ids are empty: a session needs at least one token")
    if array.dtype.kind not in "iu":
        raise InputError(f"token ids must be integers, not {array.dtype} (did you pass text, or embeddings?)")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise InputError(f"token ids must be [n] or [1, n], not {list(array.shape)}; one session is one sequence")
    check_range(array, vocab_size)
    if max_positions and len(array) > max_positions:
        raise InputError(f"{len(array)} tokens are more than the model's {max_positions} positions")
    tokens: Int32Array = np.ascontiguousarray(array, dtype=np.int32)
    return tokens


def check_range(array: np.ndarray[Any, Any], vocab_size: int) -> None:
    """InputError that names the first id below 0 or beyond the vocabulary."""
    limit = vocab_size or np.iinfo(np.int32).max
    if array.min() < 0 or array.max() >= limit:
        at = int(np.argmax((array < 0) | (array >= limit)))
        raise InputError(f"token id {array[at]} at position {at} is outside the vocabulary [0, {limit})")
