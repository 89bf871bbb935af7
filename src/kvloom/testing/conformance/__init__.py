"""The tests that every cold tier passes.  Needs pytest and hypothesis.

Make a class in a test file of one's own, and run it with pytest::

    class TestMine(TierConformance):
        def make(self, tmp_path, capacity):
            return MyTier(capacity)

``docs/tiers.md`` says what the methods promise.
"""

import pytest

pytest.register_assert_rewrite(
    "kvloom.testing.model",
    *(f"kvloom.testing.conformance.{name}" for name in ("reading", "chains", "keeping", "together")),
)

from kvloom.testing.conformance.chains import Chains  # noqa: E402
from kvloom.testing.conformance.keeping import Keeping  # noqa: E402
from kvloom.testing.conformance.reading import Reading  # noqa: E402
from kvloom.testing.conformance.together import Together  # noqa: E402


class TierConformance(Reading, Chains, Keeping, Together):
    """Override ``make``, and what is not so of a tier."""


__all__ = ["TierConformance"]
