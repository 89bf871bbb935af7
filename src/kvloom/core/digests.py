"""Digests that name prefixes in cold tiers: one call for a whole prompt, lazily, off the critical path.

In memory prefixes are compared token by token and need no digest.  On disk and remote the state of a prefix is filed
under the digest of its boundary, equal in every process and on every machine.  ``docs/identity.md`` specifies it byte
for byte:

    leaf(i) = keyed_hash(leaf key, tokens of segment i)         independent of each other, many at a time
    link(i) = keyed_hash(link key, link(i - 1) || leaf(i))      one block of 64 bytes

with BLAKE3, and keys derived from the encoded namespace, so that a salt can be read nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.core.blake3 import (
    DERIVE_KEY_CONTEXT,
    DERIVE_KEY_MATERIAL,
    IV,
    KEYED_HASH,
    chain,
    hash_items,
)
from kvloom.errors import InputError
from kvloom.types import AnyArray, Int32Array

LEAF_CONTEXT = "kvloom 2026-11 prefix identity v1: leaf key"
LINK_CONTEXT = "kvloom 2026-11 prefix identity v1: link key"
ROOT_CONTEXT = "kvloom 2026-11 prefix identity v1: root"

DIGEST_BYTES = 32


def _words(data: bytes) -> AnyArray:
    """The bytes as little-endian words, zero-padded; writable, since Numba would compile again for read-only arrays."""
    return np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.uint32)


def blake3(data: bytes, *, key: bytes | None = None) -> bytes:
    """BLAKE3 of ``data``, with a 32-byte ``key`` in its keyed mode: 32 bytes."""
    if key is not None and len(key) != DIGEST_BYTES:
        raise InputError(f"a BLAKE3 key has {DIGEST_BYTES} bytes, not {len(key)}")
    under, flags = (IV, 0) if key is None else (_words(key), KEYED_HASH)
    return _one(under, flags, data)


def derive_key(context: str, material: bytes) -> bytes:
    """BLAKE3's key derivation: 32 bytes that depend on a constant ``context`` and on ``material``."""
    context_key = _one(IV, DERIVE_KEY_CONTEXT, context.encode())
    return _one(_words(context_key), DERIVE_KEY_MATERIAL, material)


def _one(key: AnyArray, flags: int, data: bytes) -> bytes:
    return _bytes(hash_items(key, flags, _words(data), 0, len(data), np.empty((1, 8), dtype=np.uint32))).tobytes()


def _bytes(digests: AnyArray) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(digests.astype("<u4", copy=False)).view(np.uint8)


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """What one namespace hashes with: made once per namespace, by ``of``.

    Attributes:
        leaf: uint32 [8], key of the leaves; not shown.
        link: uint32 [8], key of the links; not shown.
        root: 32 bytes: the digest of the empty prefix, and a name of the namespace that shows nothing of its salt.
    """

    leaf: AnyArray = field(repr=False)
    link: AnyArray = field(repr=False)
    root: bytes

    @classmethod
    def of(cls, namespace: bytes) -> PrefixKeys:
        """Keys of an encoded namespace (``kvloom.core.namespace.encode_namespace``)."""
        leaf, link, root = (derive_key(context, namespace) for context in (LEAF_CONTEXT, LINK_CONTEXT, ROOT_CONTEXT))
        return cls(_words(leaf), _words(link), root)


def prefix_digests(
    keys: PrefixKeys, tokens: Int32Array, segment: int, *, after: bytes | None = None
) -> npt.NDArray[np.uint8]:
    """Digests of every segment boundary of ``tokens``, and of their end where that lies within a segment.

    Args:
        keys: of the namespace.
        tokens: int32 [t], C-contiguous; those of the whole prompt, or those that follow the boundary ``after``.
        segment: tokens per segment, at least 1.
        after: digest of the segment boundary that ``tokens`` begin at; None: they begin at the root.

    Returns uint8 [ceil(t / segment), 32]: row i is the digest at token ``min((i + 1) * segment, t)``.

    Raises InputError for tokens that are not such an array, and for a segment or link of another size.  Thread-safe.
    """
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InputError(f"digests take int32 tokens of one dimension, not {tokens.dtype} of shape {tokens.shape}")
    if segment < 1:
        raise InputError(f"a segment of {segment} tokens has no digest; use at least 1")
    if after is not None and len(after) != DIGEST_BYTES:
        raise InputError(f"a digest has {DIGEST_BYTES} bytes, not {len(after)}")
    words = np.require(tokens, dtype="<i4", requirements=["C", "W"]).view(np.uint32)
    whole, rest = divmod(len(words), segment)
    digests = np.empty((whole + (rest > 0), 8), dtype=np.uint32)
    if whole:
        hash_items(keys.leaf, KEYED_HASH, words, segment, 4 * segment, digests[:whole])
    if rest:
        hash_items(keys.leaf, KEYED_HASH, words[whole * segment :], 0, 4 * rest, digests[whole:])
    chain(keys.link, _words(keys.root if after is None else after), digests, np.empty(16, dtype=np.uint32))
    return _bytes(digests)
