"""How many tokens must run again so that lost windows and tails come back, over kept compressed state.

A layer's rows at position q are exact when its input there is.  A query of a full or compressed layer reads kept rows,
so its output is exact where its input is.  A query of a window reads the rows of the last ``window`` tokens, which have
to be made again: its output is exact ``window - 1`` tokens further on than its input, or from the next chunk on.
Walking the layers from the last to the first gives the position from which on the embeddings are needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Kind

_PREFIX = (Kind.COMPRESSED, Kind.INDEXER)


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, position) to run; none when ``reason`` says why that is not possible.

    Attributes:
        position: the boundary whose state is made.
        start: where the run begins: a multiple of the LCM, so that no compressed entry is open there.
        exact: whether every state is the arithmetic of a cold run; else an approximation.
        reason: empty, or why there is no replay.
    """

    position: int
    start: int
    exact: bool
    reason: str = ""

    @property
    def tokens(self) -> int:
        """Tokens to run; 0 when it is not possible."""
        return 0 if self.reason else self.position - self.start

    def __bool__(self) -> bool:
        return not self.reason


def replayed_groups(spec: ModelSpec) -> tuple[int, ...]:
    """Indices of the groups that a replay can make: windows and tails."""
    return tuple(i for i, group in enumerate(spec.groups) if group.kind in (Kind.WINDOW, Kind.TAIL))


def replay_span(
    spec: ModelSpec, position: int, groups: Collection[int] | None = None, *, exact: bool = True, skip: int = 0
) -> Span:
    """What to run so that ``groups`` (indices; all windows and tails by default) can be resumed at ``position``.

    ``exact`` False: only as far back as the oldest row that is needed (bounded replay), as if what the first of these
    rows read before it were nothing.  ``skip``: tokens that need no compute anyway; a replay of as many as are left is
    no shorter than computing them.
    """
    reason = _refusal(spec, groups)
    wanted = replayed_groups(spec) if groups is None else groups
    if not reason and not any(needed_from(spec.groups[g], position) < position for g in wanted):
        reason = "nothing is missing that a replay makes"
    if reason:
        return Span(position, position, exact, reason)
    first = _frontier(spec, position, wanted, exact=exact)
    start = max(0, first) // spec.lcm_tokens * spec.lcm_tokens
    if first <= 0 or start <= skip:
        reason = f"a replay would begin at {max(0, first)}, no later than computing the tokens again"
    return Span(position, start, exact, reason)


def needed_from(group: GroupSpec, position: int) -> int:
    """The first token whose row must be exact so that ``group`` can be resumed at ``position``; it: nothing needed.

    Windows in whole blocks, since other boundaries may use them.
    """
    if group.is_snapshot:
        multiple = group.needed_unless_multiple_of
        if position < group.first_needed or (multiple and position % multiple == 0):
            return position
        begun = position // group.ratio * group.ratio
        return begun if multiple else begun - group.ratio  # without: what the next entry overlaps
    row = position // group.window * group.window if group.chunked else max(0, position - group.window + 1)
    return min(position, row // group.block_tokens * group.block_tokens)


def _frontier(spec: ModelSpec, position: int, wanted: Collection[int], *, exact: bool) -> int:
    """The first token to run."""
    state: dict[int, int] = {}
    for g in wanted:
        need = needed_from(spec.groups[g], position)
        for layer in spec.groups[g].layers:
            state[layer] = min(need, state.get(layer, position))
    if not exact:
        return min(state.values())
    windows = {layer: group for group in spec.groups if group.kind is Kind.WINDOW for layer in group.layers}
    output = position
    for layer in range(max(*state, *windows), -1, -1):
        window = windows.get(layer)
        if window is not None and output < position:
            output = output // window.window * window.window if window.chunked else output - window.window + 1
        output = min(output, state.get(layer, position))
    return output


def _refusal(spec: ModelSpec, groups: Collection[int] | None) -> str:
    other = [g for g in spec.groups if g.kind not in (*_PREFIX, Kind.WINDOW, Kind.TAIL)]
    if other:
        return f"{other[0].name} is state that every token before it has changed, so only all of them make it again"
    lost = [spec.groups[g] for g in groups or () if spec.groups[g].kind in _PREFIX]
    if lost:
        return f"{lost[0].name} itself is lost"
    if not replayed_groups(spec):
        return "the model has no windows and no tails"
    return ""
