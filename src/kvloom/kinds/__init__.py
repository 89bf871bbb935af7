"""The kinds of cached state, one strategy each, behind ``CacheState``."""

from __future__ import annotations

from kvloom.errors import SpecError
from kvloom.kinds.blocks import CompressedState, IndexerState, WindowState
from kvloom.kinds.cache_state import CacheState, Check, MatchRule, Recovery, RuleRow
from kvloom.kinds.snapshots import RecurrentState, TailState
from kvloom.spec.model_spec import GroupSpec
from kvloom.types import Kind

STATES: dict[Kind, type[CacheState]] = {
    state.kind: state for state in (CompressedState, IndexerState, RecurrentState, TailState, WindowState)
}
"""The strategy of each kind.  ``DISK_PREFIX`` has none here: it is the manifest of a whole unit, not of a group."""


def state_of(group: GroupSpec) -> CacheState:
    """The strategy of ``group``; SpecError when no layer can hold its kind, or its geometry does not fit the kind."""
    state = STATES.get(group.kind)
    if state is None:
        raise SpecError(f"group {group.name!r}: {group.kind.name} is not a kind that a layer can hold")
    if group.is_snapshot != (state.rule is MatchRule.POINT):
        wanted = "block_tokens = 0" if state.rule is MatchRule.POINT else "block_tokens >= 1"
        raise SpecError(f"group {group.name!r}: kind {group.kind.name} needs {wanted}, not {group.block_tokens}")
    if state.rule is MatchRule.RUN and group.window < 1:
        raise SpecError(f"group {group.name!r}: a window of {group.window} tokens; it must be at least 1")
    return state(group)


__all__ = ["STATES", "CacheState", "Check", "MatchRule", "Recovery", "RuleRow", "state_of"]
