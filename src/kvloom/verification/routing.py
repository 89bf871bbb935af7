"""Observe which entries sparse routers pick (experts, index entries), and pin the picks of another run.

A router takes the top k of scores.  Where two scores nearly tie, another rounding order picks another entry
and everything computed from there on differs by far more than rounding: that is the model's chaos, not a
wrong resume.  So runs of different chunk shapes are compared with the picks of one of them *pinned* in
the other, and the positions at which the other would have picked differently are counted.

Routers are found without knowing the model: every ``topk`` whose leading dimensions are the tokens
of the chunk is one, numbered in the order of the calls within a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_TOPK: frozenset[Any] = frozenset({torch.topk, torch.Tensor.topk})


@dataclass(frozen=True, slots=True)
class Pick:
    """What one router picked for one token.

    ``indices`` has the shape ``[..., k]`` of the call without its token axis; ``live`` says which of them
    had a finite score (the rest only fills up the k and is masked by the model).
    """

    indices: torch.Tensor
    live: torch.Tensor

    def same_entries(self, other: Pick) -> bool:
        """Whether both picked the same set of live entries, in whatever order."""
        mine, theirs = self.indices[self.live], other.indices[other.live]
        return bool(mine.shape == theirs.shape and torch.equal(mine.sort().values, theirs.sort().values))


@dataclass(slots=True)
class Routes:
    """The picks of one run: ``(router, position) -> Pick``; routers are numbered by call order."""

    picks: dict[tuple[int, int], Pick] = field(default_factory=dict)

    def before(self, position: int) -> Routes:
        """The picks for the tokens before ``position`` only."""
        return Routes({key: pick for key, pick in self.picks.items() if key[1] < position})

    @property
    def routers(self) -> int:
        """Number of routers seen."""
        return len({router for router, _ in self.picks})


class RouteObserver(TorchFunctionMode):
    """Records the picks of every router of a forward, and pins those of ``pinned`` where given.

    Used through ``observing``.

    Attributes:
        routes: what this run would have picked by itself (given everything pinned before).
        flips: positions at which that differs from ``pinned``.
    """

    def __init__(self, pinned: Routes | None = None) -> None:
        super().__init__()
        self.routes = Routes()
        self.flips: set[int] = set()
        self._pinned = pinned
        self._start = 0
        self._count = 0
        self._router = 0

    def at(self, start: int, count: int) -> None:
        """The next forward runs the tokens of [start, start + count)."""
        self._start, self._count, self._router = start, count, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or not self._is_router(result):
            return result
        router, self._router = self._router, self._router + 1
        picks = _split(result.values, result.indices, self._count)
        for row, pick in enumerate(picks):
            self.routes.picks[router, self._start + row] = pick
        if self._pinned is None:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        return self._pin(router, picks, result, scores)

    def _is_router(self, result: Any) -> bool:
        """Whether the leading dimensions are the tokens of this chunk (batch 1) and the top is along the last."""
        shape = result.indices.shape
        return len(shape) >= 2 and self._count > 0 and (shape[0] == self._count or shape[:2] == (1, self._count))

    def _pin(self, router: int, picks: list[Pick], result: Any, scores: torch.Tensor) -> Any:
        assert self._pinned is not None
        rows, changed = [], False
        for row, own in enumerate(picks):
            position = self._start + row
            wanted = self._pinned.picks.get((router, position))
            if wanted is None or not own.same_entries(wanted):
                self.flips.add(position)
            indices = own.indices
            if wanted is not None and int(own.live.sum()) == int(wanted.live.sum()):
                indices = own.indices.clone()
                indices[own.live] = wanted.indices[wanted.live]
                changed = changed or not torch.equal(indices, own.indices)
            rows.append(indices)
        if not changed:
            return result
        indices = torch.stack(rows).reshape(result.indices.shape)
        return type(result)((scores.gather(-1, indices), indices))


def pinning(routes: Routes | None) -> RouteObserver | None:
    """An observer that pins ``routes``; None when there is nothing to pin."""
    return None if routes is None else RouteObserver(routes)


@contextmanager
def observing(model: PreTrainedModel, observer: RouteObserver | None) -> Iterator[None]:
    """Observe (and pin) the routers in every forward of ``model`` inside the block, whoever calls it; None: nothing."""
    if observer is None:
        yield
        return

    def before(_module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
        start = kwargs["past_key_values"].get_seq_length() if positions is None else int(positions[0, 0])
        observer.at(start, ids.shape[1])

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        with observer:
            yield
    finally:
        handle.remove()


def _split(values: torch.Tensor, indices: torch.Tensor, count: int) -> list[Pick]:
    """One Pick per token of a top-k result whose leading dimensions are ``count`` tokens."""
    tail = indices.shape[1:] if indices.shape[0] == count else indices.shape[2:]
    rows = indices.detach().reshape(count, *tail)
    live = values.detach().isfinite().reshape(count, *tail)
    return [Pick(rows[i], live[i]) for i in range(count)]
