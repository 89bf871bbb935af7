"""What the bytes of a slot are: runs of elements of one dtype, in the order in which they lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvloom.spec.model_spec import GroupSpec
from kvloom.types import DTYPE_BYTES, Kind

BLOCK = 128
"""Elements that share a scale in the fp8 form."""
FP8_SOURCES = ("bfloat16", "float16", "float32")
"""The dtypes that the fp8 form converts; everything else in a slot stays as it is."""
PADDING = "padding"


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` elements of ``dtype`` from byte ``offset`` of the slot on; padding counts in bytes.

    ``converts``: the fp8 form converts them.
    """

    offset: int
    count: int
    dtype: str
    converts: bool = False

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES.get(self.dtype, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return self.count * self.width

    @property
    def blocks(self) -> int:
        """How many scales the run has in the fp8 form; the last block may be shorter than the others."""
        return -(-self.count // BLOCK)

    @property
    def fp8_bytes(self) -> int:
        """Bytes of the run in the fp8 form: its scales and codes, or itself without padding."""
        if self.converts:
            return self.blocks + self.count
        return 0 if self.dtype == PADDING else self.nbytes


@dataclass(frozen=True)
class SlotFormat:
    """How the bytes of a group's slots are typed; what follows from that is worked out once.

    Attributes:
        group: its name, for messages.
        nbytes: bytes of a slot.
        runs: cover the slot from its first to its last byte.
    """

    group: str
    nbytes: int
    runs: tuple[Run, ...]

    @functools.cached_property
    def has_fp8(self) -> bool:
        """Whether any run converts, so that the group has an fp8 form."""
        return any(run.converts for run in self.runs)

    @functools.cached_property
    def converted(self) -> int:
        """Elements that the fp8 form converts."""
        return sum(run.count for run in self.runs if run.converts)

    @functools.cached_property
    def fp8_bytes(self) -> int:
        """Bytes of scales, codes and what is kept as it is in the fp8 form."""
        return sum(run.fp8_bytes for run in self.runs)


def may_fp8(group: GroupSpec) -> bool:
    """Whether objects of the group have an fp8 form.

    Snapshots (TAIL, RECURRENT) have none: they are read back into running sums, where an error would grow.  Groups
    whose tensors are all quantised or integers already have none.  INDEXER keys do when they are floats: they rank
    entries, models that ship quantised keep them in this very format, and the grade says that the ranking may differ.
    """
    return _keeps_blocks(group) and any(tensor.dtype in FP8_SOURCES for tensor in group.tensors)


def _keeps_blocks(group: GroupSpec) -> bool:
    return not group.is_snapshot and group.kind not in {Kind.TAIL, Kind.RECURRENT}


@functools.lru_cache(maxsize=256)
def slot_format(group: GroupSpec) -> SlotFormat:
    """The runs of a slot of ``group``: every tensor of every layer, and the padding between and behind them.

    Tensors that adjoin are one run where no block of scales would reach over their border.
    """
    converts = _keeps_blocks(group)
    runs: list[Run] = []
    for layer in range(len(group.layers)):
        ends = [*group.tensor_offsets[1:], group.layer_stride]
        for tensor, offset, end in zip(group.tensors, group.tensor_offsets, ends, strict=True):
            size = tensor.entry_bytes * group.block_entries
            start = layer * group.layer_stride + offset
            count = size // DTYPE_BYTES[tensor.dtype]
            _add(runs, Run(start, count, tensor.dtype, converts and tensor.dtype in FP8_SOURCES))
            if end > offset + size:
                _add(runs, Run(start + size, end - offset - size, PADDING))
    return SlotFormat(group.name, group.slot_bytes, tuple(runs))


def _add(runs: list[Run], run: Run) -> None:
    last = runs[-1] if runs else None
    joins = last is not None and (last.dtype, last.converts) == (run.dtype, run.converts)
    if last is not None and joins and (not run.converts or last.count % BLOCK == 0):
        runs[-1] = Run(last.offset, last.count + run.count, run.dtype, run.converts)
    else:
        runs.append(run)
