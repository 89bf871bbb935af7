"""Behind one directory of state, what another salt, model or setting made is never found (D9, D13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import Shop  # noqa: E402

from kvloom.testing.families import random_model, tiny_config  # noqa: E402

SALT = b"a salt that nobody may read"


def test_d13_another_salt_misses_and_none_can_be_read(shop: Shop) -> None:
    ids = shop.ids()
    assert shop.once("gpt_oss", ids, salt=SALT) == 0
    assert shop.once("gpt_oss", ids, salt=b"another") == 0
    assert shop.once("gpt_oss", ids) == 0
    assert shop.once("gpt_oss", ids, salt=SALT, extra_keys=(("lora", "x"),)) == 0
    assert shop.once("gpt_oss", ids, salt=SALT) == len(ids) - 1
    for path in shop.place.rglob("*"):
        assert SALT not in path.name.encode()
        assert not path.is_file() or SALT not in path.read_bytes(), path


def edited() -> Any:
    model = random_model(tiny_config("gpt_oss"))
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3].mul_(1.5)
    return model


def other_scale() -> Any:
    return random_model(tiny_config("gpt_oss", rms_norm_eps=1e-3))


def eager_attention() -> Any:
    model = random_model(tiny_config("gpt_oss"))
    other = "sdpa" if model.config._attn_implementation == "eager" else "eager"
    model.config._attn_implementation = other
    return model


def other_experts() -> Any:
    model = random_model(tiny_config("gpt_oss"))
    other = "batched_mm" if model.config._experts_implementation == "eager" else "eager"
    model.set_experts_implementation(other)
    return model


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weights": lambda: {"model": edited()},
    "rms_norm_eps": lambda: {"model": other_scale()},
    "dtype": lambda: {"dtype": "bfloat16"},
    "segment": lambda: {"segment": 64, "snapshot_interval": 64},
    "block size": lambda: {"block_size": 32},
    "attention implementation": lambda: {"model": eager_attention()},
    "experts implementation": lambda: {"model": other_experts()},
}


@pytest.mark.parametrize("what", OTHERS)
def test_d9_state_of_another_model_misses(shop: Shop, what: str) -> None:
    ids = shop.ids(100)
    assert shop.once("gpt_oss", ids) == 0
    assert shop.once("gpt_oss", ids, engine=OTHERS[what]()) == 0
    assert shop.once("gpt_oss", ids, engine=OTHERS[what]()) == 99, "and is kept beside it"
    assert shop.once("gpt_oss", ids) == 99


def test_d9_another_thread_count_misses(shop: Shop) -> None:
    ids = shop.ids(40)
    assert shop.once("gpt_oss", ids) == 0
    torch.set_num_threads(2)
    try:
        with shop.engine("gpt_oss") as engine, engine.open(ids) as session:
            assert session.reused == 0
    finally:
        torch.set_num_threads(1)
    assert shop.once("gpt_oss", ids) == 39


def test_d9_equal_weights_elsewhere_hit(shop: Shop) -> None:
    ids = shop.ids(100)
    assert shop.once("gpt_oss", ids) == 0
    assert shop.once("gpt_oss", ids, engine={"model": random_model(tiny_config("gpt_oss"))}) == 99


def test_d9_what_a_changed_model_went_on_with_is_not_kept(shop: Shop) -> None:
    """Weights that are edited below an open session, and edited back."""
    model, ids = random_model(tiny_config("gpt_oss")), shop.ids(100)
    weight = model.model.layers[0].input_layernorm.weight
    original = weight.detach().clone()
    with shop.engine("gpt_oss", model=model) as engine:
        session = engine.open(ids)
        session.step(99)
        with torch.no_grad():
            weight.mul_(1.5)
        session.step(99)
        with torch.no_grad():
            weight.copy_(original)
        session.prefill()
        session.close()
        assert engine.cold.stats.stores == 0
        assert engine.cold.stats.not_stored["model changed"] > 0
    assert shop.once("gpt_oss", ids) == 0
    assert shop.once("gpt_oss", ids) == 99
