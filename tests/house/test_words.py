"""What people read when they print a grade or an explanation."""

from __future__ import annotations

import json

import pytest

from kvloom import Explanation, Grade, Kind, Limit, Reason
from kvloom.plan import MEANING


def test_grades_print_as_words() -> None:
    assert [str(g) for g in sorted(Grade, reverse=True)] == ["canonical", "faithful", "approximate"]
    assert f"{Grade.CANONICAL}" == "canonical"
    assert f"[{Grade.FAITHFUL:>10}]" == "[  faithful]"
    assert (int(Grade.CANONICAL), json.dumps(Grade.CANONICAL), Grade.CANONICAL > Grade.FAITHFUL) == (2, "2", True)


@pytest.mark.parametrize("reason", Reason)
def test_every_limit_is_a_sentence(reason: Reason) -> None:
    of_group = str(Limit(reason, 1280, kind=Kind.WINDOW, group="window.128"))
    assert of_group == f"stopped at 1,280 in tier device, window (window.128): {MEANING[reason]}"
    assert str(Limit(reason, 0)) == f"stopped at 0 in tier device, the hit: {MEANING[reason]}"


def test_explanations_are_one_sentence() -> None:
    miss = Explanation(0, None, 300, 0, (Limit(Reason.EMPTY, 0),))
    assert str(miss) == "miss: 0 of 300 tokens reused; stopped at 0 in tier device, the hit: nothing is cached"
    evicted = Limit(Reason.EVICTED, 1152, kind=Kind.WINDOW, group="window.128")
    hit = Explanation(1024, Grade.FAITHFUL, 3395, 1280, (evicted, Limit(Reason.TOKENS, 1280)))
    assert str(hit) == (
        "faithful hit: 1,024 of 3,395 tokens reused; "
        "stopped at 1,152 in tier device, window (window.128): dropped to make room; "
        "stopped at 1,280 in tier device, the hit: no cached prefix goes on with these tokens"
    )
