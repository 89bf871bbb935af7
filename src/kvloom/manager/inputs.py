"""What callers hand to the manager, checked: every refusal says what, where and how to fix it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvloom.config import parse_grade
from kvloom.core.namespace import ExtraKey
from kvloom.errors import InputError
from kvloom.plan import CopyPlan
from kvloom.types import AnyArray, Grade

_MOST_KEY_BITS = 4096
_EXAMPLE = "(('lora', 'name'),)"


def grade_of(value: object, what: str = "floor") -> Grade:
    """A ``Grade``, or the one with this name (any case); InputError for anything else."""
    if isinstance(value, Grade):
        return value
    if isinstance(value, str):
        return parse_grade(value)
    grades = ", ".join(f"Grade.{g.name}" for g in sorted(Grade, reverse=True))
    raise InputError(f"{what} must be one of {grades}, or its name, not {value!r}")


def whole_number(value: object, what: str, least: int = 0) -> int:
    """A whole number of at least ``least`` (Python's or NumPy's; no bool); InputError for anything else."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{what} must be a whole number, not {value!r}") from None
    if number < least:
        raise InputError(f"{what} must be at least {least}, not {number}")
    return number


def checked_keys(extra_keys: object) -> tuple[ExtraKey, ...]:
    """Extra keys as a tuple; the pairs themselves are checked where they are encoded."""
    if not isinstance(extra_keys, Sequence) or isinstance(extra_keys, (str, bytes, bytearray)):
        kind = type(extra_keys).__name__
        raise InputError(f"extra_keys must be a sequence of (name, value) pairs, such as {_EXAMPLE}, not {kind}")
    keys = tuple(extra_keys)
    for key in keys:
        if not isinstance(key, tuple):
            raise InputError(f"extra key {key!r} must be a (name, value) pair, as in extra_keys={_EXAMPLE}")
        if len(key) == 2 and isinstance(key[1], int) and key[1].bit_length() > _MOST_KEY_BITS:
            raise InputError(f"extra key {key[0]!r}: its number has more than {_MOST_KEY_BITS} bits; use a digest")
    return keys


def checked_plan(plan: object) -> CopyPlan:
    """InputError for what is not a plan."""
    if not isinstance(plan, CopyPlan):
        raise InputError(f"a CopyPlan that this manager handed out is expected, not {type(plan).__name__}")
    return plan


def integers_of(array: AnyArray, top: int, already: int = 0) -> AnyArray:
    """An object array of token ids as int64; InputError that names the first entry which is no id below ``top``."""
    if array.ndim == 0:
        kind = type(array.item()).__name__
        raise InputError(f"tokens must be a 1-D array of integers, not {kind}; pass a list of ids")
    flat = array.reshape(-1)
    for at, value in enumerate(flat):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InputError(
                f"tokens must be integers; the one at position {already + at} is {_short(value)} "
                f"({type(value).__name__}, in an array of dtype object)"
            )
        if not 0 <= value < top:
            raise InputError(
                f"token {_short(value)} at position {already + at} is outside the vocabulary, 0 to {top - 1}"
            )
    return array.astype(np.int64)


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
