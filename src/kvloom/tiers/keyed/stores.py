"""What the author of a tier writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


class ByteStore(Protocol):
    """Bytes under keys.  Called by several threads at once, never twice at once for one key but to delete it.

    Keys are up to 64 characters ``a`` to ``z`` and ``0`` to ``9``.  No key is ever written twice.  Every method may
    raise any ``Exception`` for what the medium does.
    """

    def put(self, key: str, data: memoryview) -> None:
        """Keep these bytes; they may be kept without a copy.

        Once it returns, ``get`` has them, and a durable store has them after a power cut.  When it raises, anything may
        be there; the key is deleted then.
        """

    def get(self, key: str) -> bytes | bytearray | memoryview | None:
        """What is there; None for nothing."""

    def delete(self, key: str) -> None:
        """Nothing is there any more, nor anything that a ``put`` that failed left.  No error when nothing was."""


@runtime_checkable
class Lists(ByteStore, Protocol):
    """What a durable tier is made over."""

    def keys(self) -> Iterable[str]:
        """All keys at which something is.  Those of others are no harm.  Asked once, when the tier is made."""


@runtime_checkable
class Closes(ByteStore, Protocol):
    """What is to be closed with its tier."""

    def close(self) -> None:
        """Nothing is asked any more."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a byte store raised."""

    reason: str


def asked(what: str, call: Callable[[], T]) -> T | Failure:
    """What a byte store answers; ``what`` is for the reason when it fails."""
    try:
        return call()
    except Exception as error:  # whatever the code of others raises is a failure of the medium, and is told
        return Failure(f"could not {what}: {type(error).__name__}: {error}")
