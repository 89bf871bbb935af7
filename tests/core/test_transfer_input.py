"""What the manager refuses of plans, stored objects and tokens, and what it does when there is no room for a load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core import specs
from tests.core.cold_rules import NOTHING, all_good, all_of, array, held, planned, stored_objects
from tests.core.workshop import engine, ids, prompt_of

from kvloom.core.fields import PINS
from kvloom.errors import InputError, SequenceError
from kvloom.plan import CopyPlan, StoredObjects, TransferPlan


def objects(*items: tuple[int, int, int, int]) -> StoredObjects:
    return stored_objects(items)


@pytest.mark.parametrize(
    "stored",
    [
        objects((3, 0, 0, 2)),
        objects((-1, 0, 0, 2)),
        objects((0, 2, 0, 2)),
        objects((0, -1, 0, 2)),
        objects((0, 0, 2, 2)),
        objects((0, 0, -1, 2)),
        objects((0, 0, 0, 3)),
        objects((0, 0, 0, -1)),
        objects((2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1)),
        StoredObjects(*(np.zeros(n, dtype=np.int32) for n in (2, 2, 2, 1))),
        StoredObjects(*(np.zeros((2, 2), dtype=np.int32) for _ in range(4))),
    ],
)
def test_objects_that_the_model_does_not_have(stored: StoredObjects) -> None:
    e = engine(specs.FULL_WINDOW, 80)
    sequence = e.open(prompt_of(22))
    e.prefill(sequence, prompt_of(20))
    with pytest.raises(InputError):
        e.manager.colder.plan_load(ids(prompt_of(20)), stored)
    with pytest.raises(InputError):
        e.manager.colder.plan_offload(sequence.tokens, stored)
    sequence.close()
    e.manager.check_integrity()
    assert held(e.manager) == 0


def test_plans_that_are_not_ours() -> None:
    one, other = engine(specs.FULL_WINDOW, 80), engine(specs.FULL_WINDOW, 80)
    mine, theirs = planned(one, prompt_of(20), 20), planned(other, prompt_of(20), 20)
    copied = TransferPlan(*(getattr(mine, name) for name in TransferPlan.__dataclass_fields__))
    for foreign in (theirs, copied):
        with pytest.raises(InputError, match="another manager"):
            one.manager.colder.finish_load(foreign, all_good(foreign))
        with pytest.raises(InputError, match="another manager"):
            one.manager.colder.finish_store(foreign)
    with pytest.raises(InputError, match="other direction"):
        one.manager.colder.finish_store(mine)
    for nothing in (None, 3, CopyPlan(ticket=1)):
        with pytest.raises(InputError, match="TransferPlan"):
            one.manager.colder.finish_load(nothing, all_good(mine))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="TransferPlan"):
            one.manager.colder.finish_store(nothing)  # type: ignore[arg-type]
    for good in (all_good(mine)[1:], np.ones((len(mine), 1)), True, []):
        with pytest.raises(InputError, match="good"):
            one.manager.colder.finish_load(mine, good)
    assert len(one.manager.transfers) == 1
    one.manager.check_integrity()
    one.manager.colder.finish_load(mine, all_good(mine).tolist())
    assert (len(one.manager.transfers), held(one.manager)) == (0, 0)
    one.manager.check_integrity()


def test_sequences_that_are_not_ours() -> None:
    e, other = engine(specs.FULL_WINDOW, 80), engine(specs.FULL_WINDOW, 80)
    sequence = e.open(prompt_of(20))
    with pytest.raises(InputError, match="this manager opened"):
        other.manager.colder.may_take_over(sequence)
    with pytest.raises(InputError, match="this manager opened"):
        e.manager.colder.may_take_over("sequence")  # type: ignore[arg-type]
    assert not e.manager.colder.may_take_over(sequence)
    sequence.close()
    with pytest.raises(SequenceError):
        assert sequence.tokens is None


def test_tokens_of_which_nothing_can_be_stored() -> None:
    e = engine(specs.FULL_WINDOW, 80)
    sequence = e.open(prompt_of(20))
    assert e.manager.colder.plan_offload(prompt_of(20), NOTHING) is None, "nothing is computed yet"
    assert e.manager.colder.plan_offload(prompt_of(20), NOTHING, salt=b"nobody") is None
    e.prefill(sequence, prompt_of(20))
    assert e.manager.colder.plan_offload(prompt_of(20), NOTHING, salt=b"nobody") is None
    plan = e.manager.colder.plan_offload(prompt_of(20), NOTHING)
    assert plan is not None
    e.manager.colder.finish_store(plan)
    sequence.close()


@pytest.mark.parametrize("tokens", [[], [-1], [100], [[1, 2]], "text"])
def test_tokens_that_are_none(tokens: Any) -> None:
    manager = engine(specs.FULL_WINDOW, 80).manager
    with pytest.raises(InputError):
        manager.colder.chain(tokens)
    with pytest.raises(InputError):
        manager.colder.plan_load(tokens, NOTHING)


def test_a_prompt_that_can_never_fit_is_not_loaded() -> None:
    e = engine(specs.FULL_WINDOW, 46)
    e.request(prompt_of(17, 1))
    used = e.manager.stats().used
    tokens = prompt_of(400)
    assert e.manager.colder.plan_load(array(tokens), all_of(e.manager, 400)) is None
    assert e.manager.stats().used == used, "nothing went for it"


def test_a_full_index_is_no_room() -> None:
    e = engine(specs.FULL, 64, max_nodes=4)
    sequence = e.open(prompt_of(26))
    e.prefill(sequence, prompt_of(24))
    assert e.manager.colder.plan_load(ids(prompt_of(40, 3)), all_of(e.manager, 40)) is None
    sequence.close()
    e.manager.check_integrity()
    assert e.manager.arrays.slot[:, PINS].sum() == 0
