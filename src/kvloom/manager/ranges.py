"""The form and grade of every token range of a running sequence: the allocator's answer to "as what does it exist?"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.core.fields import GRADE, STATE
from kvloom.core.page_table import slot_at
from kvloom.types import Form, Grade, Kind, ObjectState

if TYPE_CHECKING:
    from kvloom.manager.sequence import CachedSequence
    from kvloom.spec.model_spec import GroupSpec


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``[start, stop)`` of one group, all in the same form, grade and life-cycle state.

    ``grade`` and ``state`` are None where nothing is held (``Form.ABSENT``).
    """

    group: str
    kind: Kind
    start: int
    stop: int
    form: Form
    grade: Grade | None
    state: ObjectState | None


def token_ranges(sequence: CachedSequence, groups: tuple[GroupSpec, ...]) -> tuple[TokenRange, ...]:
    """What a running sequence holds of its computed tokens, per group, neighbours merged."""
    found: list[TokenRange] = []
    for g, group in enumerate(groups):
        pieces = [_live(sequence, g, group)] if group.is_snapshot else _blocks(sequence, g, group)
        for piece in pieces:
            last = found[-1] if found else None
            if last is not None and _alike(last, piece):
                found[-1] = TokenRange(last.group, last.kind, last.start, piece.stop, last.form, last.grade, last.state)
            elif piece.stop > piece.start:
                found.append(piece)
    return tuple(found)


def _alike(a: TokenRange, b: TokenRange) -> bool:
    return (a.group, a.form, a.grade, a.state, a.stop) == (b.group, b.form, b.grade, b.state, b.start)


def _blocks(sequence: CachedSequence, g: int, group: GroupSpec) -> list[TokenRange]:
    a, r = sequence.books()
    form = Form.COMPRESSED if group.ratio > 1 else Form.UNCOMPRESSED
    first = sequence.first_block(g)
    end = sequence.length // group.ratio * group.ratio
    pieces = [TokenRange(group.name, group.kind, 0, min(first * group.block_tokens, end), Form.ABSENT, None, None)]
    for block in range(first, sequence.num_blocks(g)):
        slot = int(slot_at(a, r, sequence.row, g, block))
        start = block * group.block_tokens
        grade, state = Grade(int(a.slot[slot, GRADE])), ObjectState(int(a.slot[slot, STATE]))
        stop = min(start + group.block_tokens, end)
        pieces.append(TokenRange(group.name, group.kind, start, stop, form, grade, state))
    return pieces


def _live(sequence: CachedSequence, g: int, group: GroupSpec) -> TokenRange:
    """A tail covers the tokens since the last compressed entry; recurrent state stands for all of them."""
    a, r = sequence.books()
    slot = int(slot_at(a, r, sequence.row, g, 0))
    multiple = group.needed_unless_multiple_of
    start = sequence.length // multiple * multiple if multiple else 0
    form = Form.UNCOMPRESSED if group.kind is Kind.TAIL else Form.COMPRESSED
    grade, state = Grade(int(a.slot[slot, GRADE])), ObjectState(int(a.slot[slot, STATE]))
    return TokenRange(group.name, group.kind, start, sequence.length, form, grade, state)
