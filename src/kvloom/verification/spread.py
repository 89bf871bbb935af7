"""Transformers compared with itself: one shot, chunked and token by token must agree up to rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvloom.verification.cold import canonical_chunks, run_cold, single_tokens
from kvloom.verification.routing import RouteObserver

SPREAD_LIMIT: dict[torch.dtype, float] = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2}
"""Largest spread, relative to the logits' scale, that rounding explains."""
SPREAD_LIMIT_OTHER = 5e-2
"""The same for bfloat16 and anything coarser."""
_ROWS = 256
"""Positions that are compared at once: logits of a large vocabulary are kept in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far transformers' own three ways to run the same tokens are apart.

    Attributes:
        scale: largest absolute logit of the one-shot run.
        absolute: largest difference of any logit at any position between any two of the runs.
        resolution: one rounding step of the largest logit in the model's dtype.
        limit: what ``relative`` may be at most.
        routers: sparse routers found in the model.
        routed_positions: positions at which a router would have picked other entries than in one shot (their
            picks are pinned, so that these positions too differ by rounding only).
        worst: which pair of runs is the farthest apart.
        position: the position where.
    """

    scale: float
    absolute: float
    resolution: float
    limit: float
    routers: int
    routed_positions: int
    worst: str
    position: int

    @property
    def relative(self) -> float:
        """The spread relative to the logits' scale; infinite when the logits are not finite or all zero."""
        return self.absolute / self.scale if self.scale > 0 else float("inf")

    @property
    def tolerance(self) -> float:
        """What the logits of a faithful hit may be off by: twice the spread.

        The spread is a sample; in half precision few roundings fall otherwise, and a short run may show none
        at all.  So it counts as at least one rounding step of the logits.
        """
        return 2.0 * max(self.absolute, self.resolution)

    @property
    def supported(self) -> bool:
        """Whether transformers resumes this model correctly."""
        return self.relative <= self.limit


def measure_spread(model: PreTrainedModel, ids: torch.Tensor, segment: int) -> Spread:
    """Run ``ids`` (``[1, n]``) three ways with transformers' own caches and compare all logits."""
    tokens = ids.shape[1]
    first = RouteObserver()
    one_shot = run_cold(model, ids, [(0, tokens)], logits_to_keep=0, observer=first).all_logits()
    runs, flips = {"one shot": one_shot}, set()
    for name, chunks in (("chunked", canonical_chunks(tokens, segment)), ("token by token", single_tokens(tokens))):
        observer = RouteObserver(first.routes)
        runs[name] = run_cold(model, ids, chunks, logits_to_keep=0, observer=observer).all_logits()
        flips |= observer.flips
    scale = float(one_shot.abs().max().float().nan_to_num(nan=0.0, posinf=0.0))
    absolute, worst, position = 0.0, "", 0
    names = list(runs)
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            per_position = _largest_per_row(runs[left], runs[right])
            largest = float(per_position.max())
            if largest >= absolute:
                absolute, worst, position = largest, f"{left} / {right}", int(per_position.argmax())
    return Spread(
        scale=scale,
        absolute=absolute,
        resolution=torch.finfo(model.dtype).eps * scale,
        limit=SPREAD_LIMIT.get(model.dtype, SPREAD_LIMIT_OTHER),
        routers=first.routes.routers,
        routed_positions=len(flips),
        worst=worst,
        position=position,
    )


def _largest_per_row(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Largest absolute difference in each row of two ``[rows, vocab]`` tensors, float32; a NaN counts as infinite."""
    parts = [slice(at, at + _ROWS) for at in range(0, left.shape[0], _ROWS)]
    largest = torch.cat([(left[part].float() - right[part].float()).abs().amax(dim=1) for part in parts])
    return largest.nan_to_num(nan=float("inf"))
