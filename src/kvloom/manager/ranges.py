"""The form and grade of every token range of a running sequence: the allocator's answer to "as what does it exist?"."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.core.fields import GRADE, STATE
from kvloom.core.page_table import FIRST, LAST, LENGTH, slot_at
from kvloom.manager.books import Books
from kvloom.spec.model_spec import GroupSpec
from kvloom.types import Form, Grade, Kind, ObjectState


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


def token_ranges(books: Books, row: int) -> tuple[TokenRange, ...]:
    """What the sequence of ``row`` holds of its computed tokens, per group, neighbours merged."""
    found: list[TokenRange] = []
    for g, group in enumerate(books.spec.groups):
        pieces = [_live(books, row, g, group)] if group.is_snapshot else _blocks(books, row, g, group)
        for piece in pieces:
            last = found[-1] if found else None
            if last is not None and _alike(last, piece):
                found[-1] = TokenRange(last.group, last.kind, last.start, piece.stop, last.form, last.grade, last.state)
            elif piece.stop > piece.start:
                found.append(piece)
    return tuple(found)


def _alike(a: TokenRange, b: TokenRange) -> bool:
    return (a.group, a.form, a.grade, a.state, a.stop) == (b.group, b.form, b.grade, b.state, b.start)


def _blocks(books: Books, row: int, g: int, group: GroupSpec) -> list[TokenRange]:
    a, r = books.arrays, books.rows
    form = Form.COMPRESSED if group.ratio > 1 else Form.UNCOMPRESSED
    first, last = r.span[row, g, [FIRST, LAST]].tolist()
    end = int(r.state[row, LENGTH]) // group.ratio * group.ratio
    pieces = [TokenRange(group.name, group.kind, 0, min(first * group.block_tokens, end), Form.ABSENT, None, None)]
    for block in range(first, last):
        slot = int(slot_at(a, r, row, g, block))
        start = block * group.block_tokens
        grade, state = Grade(int(a.slot[slot, GRADE])), ObjectState(int(a.slot[slot, STATE]))
        stop = min(start + group.block_tokens, end)
        pieces.append(TokenRange(group.name, group.kind, start, stop, form, grade, state))
    return pieces


def _live(books: Books, row: int, g: int, group: GroupSpec) -> TokenRange:
    """A tail covers the tokens since the last compressed entry; recurrent state stands for all of them."""
    a, r = books.arrays, books.rows
    slot, length = int(slot_at(a, r, row, g, 0)), int(r.state[row, LENGTH])
    multiple = group.needed_unless_multiple_of
    start = length // multiple * multiple if multiple else 0
    form = Form.UNCOMPRESSED if group.kind is Kind.TAIL else Form.COMPRESSED
    grade, state = Grade(int(a.slot[slot, GRADE])), ObjectState(int(a.slot[slot, STATE]))
    return TokenRange(group.name, group.kind, start, length, form, grade, state)
