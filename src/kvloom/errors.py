"""The exception hierarchy.  Every message names what is wrong, where, and how to fix it."""

from __future__ import annotations


class KVLoomError(Exception):
    """Base class of everything kvloom raises on purpose."""


class InputError(KVLoomError, ValueError):
    """The caller passed something unusable (tokens, document, configuration file, preset name)."""


class ConfigError(InputError):
    """A configuration value is unknown or out of range; the message names the field and the fix."""


class SpecError(KVLoomError):
    """A model cannot be described exactly: unknown layer type, unknown state tensor, wrong shape."""


class CapacityError(KVLoomError):
    """The request does not fit into a tier under its cap.

    Attributes:
        needed: bytes that the request needs at its peak; when it can never fit, bytes of a tier that it fits into.
        cap: bytes of the tier.
        in_use: bytes that cannot be evicted now because running sequences hold them.
        never_fits: True when the request cannot fit even in an empty tier.
    """

    def __init__(self, message: str, *, needed: int, cap: int, in_use: int, never_fits: bool) -> None:
        super().__init__(message)
        self.needed = needed
        self.cap = cap
        self.in_use = in_use
        self.never_fits = never_fits


class SequenceError(KVLoomError):
    """A sequence was used after it was closed, or out of order."""


class StaleLeaseError(SequenceError):
    """A leased object's generation changed: the slot was freed or reused after the lookup.

    ``group``: the KV cache group of the object.
    """

    def __init__(self, message: str, *, group: str) -> None:
        super().__init__(message)
        self.group = group


class ArrivalError(SequenceError):
    """Cached state that a forward waited for did not arrive.  Sessions go on without it, so users do not see this."""


class LifecycleError(KVLoomError):
    """An illegal life-cycle transition was asked for; nothing was changed."""


class IntegrityError(KVLoomError):
    """``check_integrity`` found the books of the manager inconsistent."""


class TableFullError(KVLoomError):
    """A table of places has no room for another entry."""


class UnsupportedError(KVLoomError):
    """The operation is not possible with this cache (batches, beams, crop, ...)."""


class WrongThreadError(KVLoomError):
    """The manager was called from a thread that does not own it."""


class MissingExtraError(KVLoomError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class StoreError(KVLoomError):
    """A disk store cannot be used as it is; the message says how to go on."""


class FormatError(StoreError):
    """Bytes on disk (a store, an archive) are not what they should be, or were written by a newer kvloom."""
