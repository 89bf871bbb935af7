"""Token ids as users have them, checked, as the manager takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvloom.errors import InputError
from kvloom.manager.inputs import integers_of
from kvloom.types import Int32Array

_INTEGERS = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


def to_tokens(ids: Any, *, vocab_size: int = 0, max_positions: int = 0) -> Int32Array:
    """Token ids as int32 ``[n]``.

    Args:
        ids: list, NumPy array or torch tensor of integers, ``[n]`` or ``[1, n]``.
        vocab_size: ids must be below it; 0: not known.
        max_positions: there must be no more ids than this; 0: not known.

    Raises:
        InputError: what is wrong, and where.
    """
    if isinstance(ids, Mapping):
        hint = "; pass its ['input_ids']" if "input_ids" in ids else ""
        raise InputError(f"token ids must be a list, array or tensor of integers, not a {type(ids).__name__}{hint}")
    if isinstance(ids, torch.Tensor):
        array = _from_tensor(ids)
    else:
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"token ids cannot be read as an array: {error}") from None
    if array.dtype.hasobject:
        array = integers_of(array, vocab_size or np.iinfo(np.int32).max)
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


def _from_tensor(ids: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor of integers as an array; InputError for another dtype, and for one without data in rows."""
    if ids.dtype not in _INTEGERS:
        raise InputError(f"token ids must be integers, not {ids.dtype} (did you pass text, or embeddings?)")
    if ids.is_meta:
        raise InputError("token ids are a tensor on the device meta, which holds no data; pass a tensor with values")
    if ids.is_nested or ids.layout is not torch.strided:
        layout = "nested" if ids.is_nested else str(ids.layout).removeprefix("torch.")
        raise InputError(f"token ids are a {layout} tensor; pass a dense one")
    array: np.ndarray[Any, Any] = ids.numpy(force=True)
    return array


def check_range(array: np.ndarray[Any, Any], vocab_size: int) -> None:
    """InputError that names the first id below 0 or beyond the vocabulary."""
    limit = vocab_size or np.iinfo(np.int32).max
    if array.min() < 0 or array.max() >= limit:
        at = int(np.argmax((array < 0) | (array >= limit)))
        raise InputError(f"token id {array[at]} at position {at} is outside the vocabulary [0, {limit})")
