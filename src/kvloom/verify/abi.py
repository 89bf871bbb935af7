"""Level 2, kernel ABI: the layout identity that is part of every namespace.

Two managers share state only if this digest agrees: it covers every group's geometry, strides, dtypes,
ratios and windows, the segment length, and what the adapter adds (weights, attention implementation,
library versions, thread count).
"""

from __future__ import annotations

import hashlib

from kvloom.spec.model_spec import ModelSpec

KERNEL_ABI_VERSION = 1


def layout_identity(spec: ModelSpec) -> bytes:
    """BLAKE2b-256 over the typed, length-prefixed description of ``spec``."""
    digest = hashlib.blake2b(digest_size=32)

    def feed(*values: object) -> None:
        for value in values:
            encoded = f"{type(value).__name__}:{value}".encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)

    feed("abi", KERNEL_ABI_VERSION, spec.format, spec.block_size, spec.segment_tokens, spec.snapshot_interval)
    for name, text in spec.identity:
        feed("identity", name, text)
    for group in spec.groups:
        feed("group", group.name, int(group.kind), group.layers, group.ratio, group.block_tokens, group.window)
        feed(group.chunked, group.needed_unless_multiple_of, group.first_needed, group.layer_stride)
        for tensor, offset in zip(group.tensors, group.tensor_offsets, strict=True):
            feed("tensor", tensor.name, tensor.shape, tensor.dtype, tensor.entry_axis, tensor.order, offset)
    return digest.digest()
