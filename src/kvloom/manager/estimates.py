"""Moving estimates of how long work takes, from how long it took."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvloom.types import AnyArray

_RIDGE = 1e-7
_MOST = 3.0
_STALE = 8
"""Observations that the rates by which another one is weighted may not know."""


class Fit:
    """Seconds as a sum of non-negative rates times features, by least squares of errors relative to the estimate.

    Older observations count less.  One that took far too long (a hiccup) counts as three times what was expected.

    Args:
        features: how many numbers describe a piece of work; at least one of them is positive for each.
        keep: what is left of an observation's weight at the next one.
        prior: (work, seconds) that counts as an observation for ever, so that there is an estimate before the first.

    Attributes:
        observations: how many there were.
        error: moving mean of the relative error of estimates made shortly before the observation.
    """

    def __init__(self, features: int, keep: float = 0.97, prior: tuple[Sequence[float], float] | None = None) -> None:
        self._keep = keep
        self._squares: npt.NDArray[np.float64] = np.zeros((features, features))
        self._targets: npt.NDArray[np.float64] = np.zeros(features)
        self._prior: npt.NDArray[np.float64] | None = None
        if prior is not None:
            self._prior = np.array(prior[0], dtype=np.float64) / prior[1]
        self._rates: npt.NDArray[np.float64] | None = None
        self._behind = 0
        self.observations = 0
        self.error = 0.0

    def observe(self, work: Sequence[float], seconds: float) -> None:
        """It took ``seconds``; what is not positive is left out."""
        if seconds <= 0.0:
            return
        row = np.array(work, dtype=np.float64)
        expected = float(np.dot(self._recent(), row)) if self.knows else 0.0
        if expected > 0.0:
            self.error += 0.2 * (abs(expected / seconds - 1.0) - self.error)
        else:
            expected = seconds
        row /= expected
        self._squares = self._keep * self._squares + np.outer(row, row)
        self._targets = self._keep * self._targets + min(seconds / expected, _MOST) * row
        self._behind += 1
        self.observations += 1

    @property
    def knows(self) -> bool:
        """Whether there is an estimate."""
        return self.observations > 0 or self._prior is not None

    def estimate(self, work: Sequence[float]) -> float:
        """Seconds; ValueError before the first observation, without a prior."""
        return float(np.dot(self.rates, np.array(work, dtype=np.float64)))

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """Seconds per unit of every feature; ValueError before the first observation, without a prior."""
        if not self.knows:
            raise ValueError("nothing was observed yet")
        if self._rates is None or self._behind:
            squares, targets = self._squares, self._targets
            if self._prior is not None:
                squares, targets = squares + np.outer(self._prior, self._prior), targets + self._prior
            self._rates, self._behind = _non_negative(squares, targets), 0
        return self._rates

    def _recent(self) -> npt.NDArray[np.float64]:
        """Rates that may not know the last few observations: solving after every forward of a prompt takes time."""
        rates = self._rates
        return self.rates if rates is None or self._behind >= min(_STALE, self.observations // 4) else rates


def _non_negative(squares: AnyArray, targets: AnyArray) -> npt.NDArray[np.float64]:
    """The non-negative x that minimises ``x S x - 2 t x``, by trying every set of features (there are few)."""
    count = len(targets)
    scale = np.sqrt(np.maximum(np.diag(squares), np.finfo(np.float64).tiny))  # features differ by many powers of ten
    scaled, wanted = squares / np.outer(scale, scale), targets / scale
    best, found = -1.0, np.zeros(count)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            index = np.array(chosen)
            if (targets[index] <= 0.0).any():
                continue
            part = scaled[np.ix_(index, index)] + _RIDGE * np.eye(size)
            x = np.linalg.solve(part, wanted[index])
            gain = float(wanted[index] @ x)
            if (x >= 0.0).all() and gain > best * (1.0 + 1e-9):
                best, found = gain, np.zeros(count)
                found[index] = x / scale[index]
    return found
