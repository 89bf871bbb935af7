"""The calls that change a manager, as values: what was asked, and what came of it.

Sequences and batches are numbered from 1 in the order in which they were made, plans by their tickets; plan 0 had
nothing to copy.  ``refused`` names the error of a call that raised one, else it is empty; such a call made nothing, so
the numbers of what it would have made are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvloom.core.namespace import ExtraKey
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade, Int32Array, Kind, Reason


@dataclass(frozen=True, slots=True)
class Made:
    """A manager was made: everything that another one like it needs.  ``device``: bytes of its tier."""

    spec: ModelSpec
    policy: str
    device: int
    max_sequences: int
    max_nodes: int


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """``Manager.open``.  ``reason`` and ``kind``: the first thing that kept the hit from being longer."""

    seq: int
    tokens: Int32Array
    salt: bytes = b""
    keys: tuple[ExtraKey, ...] = ()
    floor: Grade = Grade.FAITHFUL
    priority: int = 0
    reused: int = 0
    grade: Grade | None = None
    reason: Reason | None = None
    kind: Kind | None = None
    plan: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """``CachedSequence.append``."""

    seq: int
    tokens: Int32Array
    plan: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """``CachedSequence.commit``."""

    seq: int
    grade: Grade = Grade.CANONICAL
    plan: int = 0


@dataclass(frozen=True, slots=True)
class Rollback:
    """``CachedSequence.rollback``."""

    seq: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``CachedSequence.checkpoint``."""

    seq: int
    plan: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """``CachedSequence.fork``."""

    seq: int
    child: int
    plan: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """``CachedSequence.close``."""

    seq: int


@dataclass(frozen=True, slots=True)
class MakeBatch:
    """``Manager.batch``."""

    batch: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """``Manager.step``."""

    batch: int
    tokens: Int32Array
    plans: tuple[int, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """``Manager.finish``."""

    batch: int
    plans: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Complete:
    """``Manager.complete``."""

    plan: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """``Manager.abandon``."""

    plan: int


@dataclass(frozen=True, slots=True)
class Evict:
    """``Manager.evict``, and the bytes that it freed."""

    bytes: int
    freed: int


@dataclass(frozen=True, slots=True)
class Clear:
    """``Manager.clear``, and how many objects went.  ``salt`` None: of every salt."""

    salt: bytes | None = None
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """``Manager.drop`` of a kind, or of the group of that name where the kind is None."""

    kind: Kind | None = None
    group: str = ""
    position: int | None = None
    quarantine: bool = False
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """The logical clock went on ``by`` so much with nothing else done: calls that were refused for their arguments."""

    by: int


Event: TypeAlias = (
    Made
    | Open
    | Append
    | Commit
    | Rollback
    | Checkpoint
    | Fork
    | Close
    | MakeBatch
    | Step
    | Finish
    | Complete
    | Abandon
    | Evict
    | Clear
    | Drop
    | Tick
)
Watch: TypeAlias = Callable[[Event], None]
"""Told every event, after the call; called in the manager's thread, and must not raise."""
