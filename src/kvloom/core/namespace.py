"""Namespaces: the injective encoding of a tenant's salt and of what else must agree for a prefix to be shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvloom.errors import InputError

ExtraKey: TypeAlias = tuple[str, str | bytes | int]
"""A named value that is part of the identity: a LoRA adapter, the digest of an image, ..."""


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "big") + value


def _utf8(text: str) -> bytes:
    """UTF-8; lone surrogates, which strict UTF-8 refuses, keep bytes of their own."""
    return text.encode(errors="surrogatepass")


def encode_namespace(salt: object, extra_keys: Sequence[object], layout: bytes) -> bytes:
    """Encode salt, extra keys (order matters) and layout identity so that different inputs never collide.

    Every field is typed and length-prefixed: a LoRA name equal to somebody's salt, or a salt that contains
    separators, yields another key.  Raises InputError for a salt or key of another type.
    """
    if not isinstance(salt, bytes):
        raise InputError(f"salt must be bytes, not {type(salt).__name__}; encode it first, e.g. name.encode()")
    parts = [_field(b"L", layout), _field(b"S", salt)]
    for key in extra_keys:
        if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
            raise InputError(f"extra key {key!r} must be a (name, value) pair with a string name")
        name, value = key
        parts.append(_field(b"N", _utf8(name)))
        if isinstance(value, bytes):
            parts.append(_field(b"b", value))
        elif isinstance(value, str):
            parts.append(_field(b"s", _utf8(value)))
        elif isinstance(value, int) and not isinstance(value, bool):
            parts.append(_field(b"i", str(value).encode()))
        else:
            raise InputError(f"extra key {name!r} has a value of type {type(value).__name__}; use str, bytes or int")
    return b"".join(parts)
