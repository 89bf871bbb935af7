"""What callers hand to the manager, checked: every refusal says what, where and how to fix it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.config import parse_grade
from kvloom.core.calls import first_outside
from kvloom.core.namespace import ExtraKey
from kvloom.errors import InputError
from kvloom.plan import CopyPlan, TransferPlan
from kvloom.types import AnyArray, Grade, Int32Array

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


def checked_transfer(plan: object) -> TransferPlan:
    """InputError for what is not a plan of a transfer."""
    if not isinstance(plan, TransferPlan):
        raise InputError(f"a TransferPlan that this manager handed out is expected, not {type(plan).__name__}")
    return plan


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What token ids may be.

    Attributes:
        top: ids are below it.
        longest: most tokens of a sequence, 0 = no limit.
        model: its name, for messages.
    """

    top: int
    longest: int
    model: str

    def checked(self, tokens: object, already: int = 0) -> Int32Array:
        """``tokens`` as int32 [n], or InputError: what, where, how to fix it.  ``already``: tokens before them."""
        array = self.array(tokens, already)
        at = first_outside(array, 0, self.top)
        if at >= 0:
            raise self.outside(array, at, already)
        return array

    def array(self, tokens: object, already: int = 0) -> Int32Array:
        """Like ``checked``, but ids that were int32 before are not looked at."""
        if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1 and tokens.size:
            array = tokens
        else:
            array = self._converted(tokens, already)
        if self.longest and already + array.size > self.longest:
            raise InputError(
                f"{already + array.size} tokens are more than the {self.longest} positions of {self.model}; "
                "shorten the prompt"
            )
        # read-only arrays are another type to compiled code, which would be compiled once more for them
        flags = array.flags
        if flags.c_contiguous and flags.aligned and flags.writeable:
            return array
        return np.require(array, dtype=np.int32, requirements=("C", "A", "W"))

    def outside(self, array: AnyArray, at: int, already: int = 0) -> InputError:
        """The error for the id at place ``at``."""
        return InputError(
            f"token {int(array[at])} at position {already + at} is outside the vocabulary, 0 to {self.top - 1}"
        )

    def _converted(self, tokens: object, already: int) -> Int32Array:
        try:
            array = np.asarray(tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"tokens must be a 1-D array of integers: {error}") from error
        if array.dtype.hasobject:
            array = integers_of(array, self.top, already)
        if array.size == 0:
            raise InputError("tokens are empty; a request needs at least one token")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(f"tokens must be a 1-D array of integers, not {array.ndim}-D of {array.dtype}")
        wrong = np.flatnonzero((array < 0) | (array >= self.top))
        if wrong.size:
            raise self.outside(array, int(wrong[0]), already)
        return array.astype(np.int32)


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
