"""Groups and slots that the tests of cold forms share."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom.kernels.reference import LARGEST_FINITE, WORDS
from kvloom.kernels.slots import SlotFormat
from kvloom.spec.model_spec import GroupSpec, TensorSpec
from kvloom.types import Kind

SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}
TRAILING = {"bfloat16": 7, "float16": 10, "float32": 23}


def tensor(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec(name, shape, dtype, entry_axis=1)


def blocks(*tensors: TensorSpec, kind: Kind = Kind.COMPRESSED, entries: int = 8, layers: int = 2) -> GroupSpec:
    return GroupSpec("full", kind, tuple(range(layers)), tensors, block_tokens=entries)


FULL = blocks(tensor("keys", (2, 64), "bfloat16"), tensor("values", (2, 64), "bfloat16"))
HALF = blocks(tensor("keys", (2, 48), "float16"), tensor("values", (2, 40), "float16"), layers=3)
SINGLE = blocks(tensor("keys", (1, 7), "float32"), tensor("values", (1, 5), "float32"), entries=5)
MLA = blocks(tensor("compressed_kv", (1, 36), "bfloat16"), entries=3, layers=1)
INDEXER = blocks(tensor("indexer_keys", (1, 32), "bfloat16"), kind=Kind.INDEXER)
WINDOW = GroupSpec("window.16", Kind.WINDOW, (0,), FULL.tensors, block_tokens=8, window=16)
MIXED = blocks(tensor("keys", (1, 40), "bfloat16"), tensor("scales", (3,), "uint8"), tensor("ids", (1,), "int64"))
QUANTISED = blocks(tensor("keys", (1, 64), "float8_e4m3fn"), tensor("values", (1, 64), "uint8"))
DOUBLE = blocks(tensor("keys", (1, 8), "float64"))
TAIL = GroupSpec("tail", Kind.TAIL, (0, 1), (TensorSpec("pending", (3, 50), "bfloat16"),))
RECURRENT = GroupSpec("state", Kind.RECURRENT, (0,), (TensorSpec("recurrent_states.0", (4, 16, 16), "float32"),))

CONVERTIBLE = (FULL, HALF, SINGLE, MLA, INDEXER, WINDOW, MIXED)
KEPT = (QUANTISED, DOUBLE, TAIL, RECURRENT)
ALL = (*CONVERTIBLE, *KEPT)


def ident(group: GroupSpec) -> str:
    return f"{group.name} {'+'.join(t.dtype for t in group.tensors)}"


def finite(rng: np.random.Generator, count: int, dtype: str, span: int = 8) -> Any:
    """Bits of finite elements of both signs whose exponents span ``span`` powers of two below a random one."""
    trailing = TRAILING[dtype]
    most = LARGEST_FINITE[dtype] >> trailing
    top = int(rng.integers(0, most + 1))
    exponent = np.clip(top - rng.integers(0, span, count), 0, most).astype(np.uint64)
    bits = exponent << np.uint64(trailing) | rng.integers(0, 1 << trailing, count, dtype=np.uint64)
    bits |= rng.integers(0, 2, count, dtype=np.uint64) * np.uint64(SIGN[dtype])
    return bits.astype(WORDS[dtype])


def slot_of(fmt: SlotFormat, seed: int = 0) -> Any:
    """A slot full of finite elements; what is not a float, and padding, is noise."""
    rng = np.random.Generator(np.random.PCG64(seed))
    slot = rng.integers(0, 256, -(-fmt.nbytes // 8) * 8, dtype=np.uint8)[: fmt.nbytes]
    for run in fmt.runs:
        if run.dtype in WORDS:
            slot[run.offset : run.offset + run.nbytes] = finite(rng, run.count, run.dtype).view(np.uint8)
    return slot
