"""What a session cannot do is a typed error, raised before anything has changed."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvloom.adapters.transformers import attach  # noqa: E402
from kvloom.errors import (  # noqa: E402
    CapacityError,
    ConfigError,
    InputError,
    SequenceError,
    SpecError,
    UnsupportedError,
    WrongThreadError,
)
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.tiers.disk import DiskStore  # noqa: E402
from kvloom.transfer.options import Admission, ColdForm, Restoring, TransferOptions  # noqa: E402

RECURRENT = ("qwen3_next", "qwen3_5", "kimi_linear", "lfm2", "lfm3", "falcon_h1", "granitemoehybrid")
Call = Callable[[Any, torch.Tensor, Any], Any]

REFUSED: dict[str, Call] = {
    "batch of two": lambda m, ids, c: m(ids.expand(2, -1), past_key_values=c),
    "beams": lambda m, ids, c: m.generate(ids, past_key_values=c, num_beams=2, max_new_tokens=3),
    "several answers": lambda m, ids, c: m.generate(
        ids, past_key_values=c, num_return_sequences=2, do_sample=True, max_new_tokens=3
    ),
    "prompt lookup": lambda m, ids, c: m.generate(ids, past_key_values=c, prompt_lookup_num_tokens=2, max_new_tokens=3),
    "assistant": lambda m, ids, c: m.generate(ids, past_key_values=c, assistant_model=m, max_new_tokens=3),
    "embeddings": lambda m, ids, c: m(inputs_embeds=m.get_input_embeddings()(ids[:, 39:]), past_key_values=c),
    "padding": lambda m, ids, c: m(ids[:, 39:], past_key_values=c, attention_mask=torch.tensor([[0] + [1] * 39])),
    "ready-made mask": lambda m, ids, c: m(ids[:, 39:], past_key_values=c, attention_mask=torch.zeros(1, 1, 1, 40)),
    "positions elsewhere": lambda m, ids, c: m(ids[:, 39:], past_key_values=c, position_ids=torch.tensor([[7]])),
    "shorter prompt": lambda m, ids, c: m.generate(ids[:, :10], past_key_values=c, max_new_tokens=3),
    "crop": lambda m, ids, c: c.crop(-1),
    "crop of one layer": lambda m, ids, c: c.layers[0].crop(-1),
    "reorder": lambda m, ids, c: c.reorder_cache(torch.tensor([0])),
    "repeat": lambda m, ids, c: c.batch_repeat_interleave(2),
    "select": lambda m, ids, c: c.batch_select_indices(torch.tensor([0])),
    "record the past": lambda m, ids, c: c.activate_past_recording(),
    "reset": lambda m, ids, c: c.reset(),
    "shallow copy": lambda m, ids, c: copy.copy(c),
    "pickle": lambda m, ids, c: pickle.dumps(c),
    "layer offload": lambda m, ids, c: c.layers[0].offload(),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_refused_and_nothing_changed(lab: Any, family: str, what: str) -> None:
    engine, ids = lab.engine(family), lab.ids(40)
    stateful = ("prompt lookup", "assistant")
    with engine.open(ids) as session:
        session.prefill()
        before, held = engine.arena.bytes.clone(), lab.held(engine)
        # transformers itself refuses assisted decoding for models that it calls stateful
        with pytest.raises((UnsupportedError, ValueError) if what in stateful else UnsupportedError):
            REFUSED[what](engine.model, ids, session.cache)
        assert session.length == 39
        assert lab.held(engine) == held
        assert torch.equal(engine.arena.bytes, before)
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


def test_a_part_of_the_model_or_another_model_cannot_use_the_cache(lab: Any) -> None:
    engine, other, ids = lab.engine("gpt_oss"), lab.engine("mistral"), lab.ids(40)
    with engine.open(ids) as session:
        with pytest.raises(SequenceError, match="outside a forward"):
            engine.model.model(ids, past_key_values=session.cache)
        with pytest.raises(UnsupportedError, match="another model"):
            other.model(ids, past_key_values=session.cache)
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


def test_other_caches_are_left_alone(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    cache = DynamicCache(config=engine.model.config)
    engine.model(ids, past_key_values=cache)
    engine.model(ids)
    assert engine.manager.stats().used == 0


def test_after_the_engine_is_closed_its_caches_raise(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    session = engine.open(ids)
    engine.close()
    uses = (
        lambda: engine.model(ids, past_key_values=session.cache),
        session.prefill,
        lambda: session.step(39),
        session.fork,
        lambda: engine.open(ids),
    )
    for use in uses:
        with pytest.raises(SequenceError, match=r"engine .* closed.* attach the model again"):
            use()
    session.close()
    assert lab.held(engine) == 0


@pytest.mark.parametrize("family", RECURRENT)
def test_a_call_past_the_hooks_does_not_touch_the_state(lab: Any, family: str) -> None:
    """Models update a recurrent state in place as soon as they have it in hand."""
    engine, ids = lab.engine(family), lab.ids(40)
    with engine.open(ids) as session:
        session.prefill()
        before = engine.arena.bytes.clone()
        with pytest.raises(SequenceError, match="outside a forward"):
            engine.model.model(ids[:, 39:], past_key_values=session.cache)
        assert torch.equal(engine.arena.bytes, before)
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


def test_a_closed_session_raises(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    session = engine.open(ids)
    session.close()
    session.close()
    with pytest.raises(SequenceError, match="closed"):
        engine.model(ids, past_key_values=session.cache)
    with pytest.raises(SequenceError, match="closed"):
        session.prefill()


def test_another_thread_is_refused(lab: Any) -> None:
    engine, ids, caught = lab.engine("gpt_oss"), lab.ids(40), []

    def use() -> None:
        for call in (
            lambda: engine.open(ids),
            session.prefill,
            lambda: engine.model(ids, past_key_values=session.cache),
        ):
            try:
                call()
            except WrongThreadError as error:
                caught.append(error)

    with engine.open(ids) as session:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(caught) == 3
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


BAD_IDS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "empty tensor": (torch.zeros(1, 0, dtype=torch.int64), "empty"),
    "negative": ([1, 2, -3], "-3 at position 2"),
    "beyond the vocabulary": ([1, 320], "320 at position 1"),
    "floats": ([0.5, 1.0], "integers"),
    "bfloat16": (torch.ones(3).bfloat16(), "integers"),
    "text": ("hello", "integers"),
    "bools": ([True, False], "integers"),
    "batch": ([[1, 2], [3, 4]], r"\[2, 2\]"),
    "ragged": ([[1], [2, 3]], "array"),
    "none": (None, "integers"),
    "too long": ([1] * 4097, "4097"),
    "huge": ([1, 2**70], "1180591620717411303424 at position 1 is outside the vocabulary"),
    "a dict": ({"input_ids": [1, 2]}, r"pass its \['input_ids'\]"),
    "a set": ({1, 2}, "not set"),
    "an object": (np.array([1, "a"], dtype=object), "position 1 is 'a'"),
    "on device meta": (torch.zeros(3, dtype=torch.int64, device="meta"), "meta"),
    "sparse": (torch.eye(3, dtype=torch.int64).to_sparse(), "sparse_coo"),
    "float8": (torch.zeros(3).to(torch.float8_e4m3fn), "integers"),
    "NaN": ([float("nan")], "integers"),
}


@pytest.mark.parametrize("what", BAD_IDS)
def test_bad_ids_are_named(lab: Any, what: str) -> None:
    ids, message = BAD_IDS[what]
    engine = lab.engine("gpt_oss")
    with pytest.raises(InputError, match=message):
        engine.open(ids)
    assert engine.manager.stats().used == 0


def test_bad_ids_in_a_forward_change_nothing(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    with engine.open(ids) as session:
        session.prefill()
        for bad in (-1, 320):
            with pytest.raises(InputError, match="vocabulary"):
                engine.model(torch.tensor([[bad]]), past_key_values=session.cache)
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


@pytest.mark.parametrize(
    "make", [torch.Tensor.tolist, torch.Tensor.numpy, lambda t: t, lambda t: t[0], lambda t: t.int()[0].tolist()]
)
def test_ids_in_every_form_are_the_same_prompt(lab: Any, make: Callable[[torch.Tensor], Any]) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    lab.answer(engine, ids)
    with engine.open(make(ids)) as session:
        assert session.reused == 39


def test_a_cap_smaller_than_the_prompt_says_what_is_needed(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss", device="200KiB"), lab.ids(1000)
    with pytest.raises(CapacityError) as caught:
        engine.open(ids)
    assert caught.value.never_fits
    assert caught.value.needed == engine.manager.peak_bytes(1000)
    assert str(caught.value.needed) in str(caught.value)


def test_no_room_in_mid_answer_leaves_the_session_where_it_was(lab: Any) -> None:
    engine = lab.engine("gpt_oss", device="300KiB")
    a, b = lab.ids(150, 1), lab.ids(120, 2)
    first, second = engine.open(a), engine.open(b)
    first.prefill()
    with pytest.raises(CapacityError) as caught:  # noqa: PT012 - where the room ends is the manager's business
        second.prefill()
        engine.model.generate(b, past_key_values=second.cache, max_new_tokens=200)
    assert not caught.value.never_fits
    engine.manager.check_integrity()
    at = second.length
    first.close()
    second.prefill()
    if at < 119:
        assert torch.equal(lab.last(second, b), lab.cold(engine.model, b))
    second.close()
    assert lab.held(engine) == 0


def test_attach_refuses_what_it_cannot_serve() -> None:
    model = random_model(tiny_config("gpt_oss"))
    with pytest.raises(ConfigError, match="size"):
        attach(model, device="lots")
    with pytest.raises(ConfigError, match="LCM"):
        attach(model, segment=100)
    with pytest.raises(CapacityError):
        attach(model, device=1000)
    model.train()
    with pytest.raises(UnsupportedError, match="eval"):
        attach(model)


def test_training_mode_after_attach_is_refused() -> None:
    model = random_model(tiny_config("gpt_oss"))
    with attach(model, device="4MiB", block_size=16) as engine, engine.open([1, 2, 3]) as session:
        model.train()
        with pytest.raises(UnsupportedError, match="eval"):
            engine.open([1, 2, 3])
        with pytest.raises(UnsupportedError, match="eval"):
            model(torch.tensor([[1, 2]]), past_key_values=session.cache)


def test_a_model_that_changed_its_dtype_is_refused(lab: Any) -> None:
    model = random_model(tiny_config("gpt_oss"))
    with attach(model, device="4MiB", block_size=16) as engine:
        session = engine.open([1, 2, 3])
        model.bfloat16()
        with pytest.raises(SequenceError, match="attach again"):
            session.prefill()
        session.close()
        assert lab.held(engine) == 0


def test_unknown_layers_are_named() -> None:
    config = tiny_config("gpt_oss")
    config.layer_types = ["sliding_attention", "mystery_attention"] * 2
    model = random_model(tiny_config("gpt_oss"))
    model.config = config
    with pytest.raises(SpecError, match="mystery_attention"):
        attach(model)


def test_transfer_options_of_another_type_are_refused() -> None:
    """A dict would be taken for options that nobody reads."""
    model = random_model(tiny_config("gpt_oss"))
    with pytest.raises(ConfigError, match="transfers must be TransferOptions, not dict; write"):
        attach(model, device="4MiB", block_size=16, host="1MiB", transfers={"gpu_watermark": 0.8})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="host: size 'lots'"):
        attach(model, device="4MiB", block_size=16, host="lots")


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    model = random_model(tiny_config("gpt_oss"))
    store = DiskStore.open(tmp_path / "store", 8 << 20)
    for options, words in (
        ({"store": str(tmp_path)}, "store must be a DiskStore, as DiskStore.open makes it, not str"),
        ({"tiers": store}, r"tiers must be a list of tiers, nearest first, not DiskStore; write tiers=\[...\]"),
        ({"tiers": [object()]}, "tiers: object is no cold tier, it lacks name, durable, lookup, read"),
        ({"store": store, "tiers": [store]}, "the same tier is there twice"),
    ):
        with pytest.raises(InputError, match=words):
            attach(model, device="4MiB", block_size=16, **options)
    attach(model, device="4MiB", block_size=16, store=store).close()
    with pytest.raises(InputError, match="is closed, as an engine closes its own; open it again"):
        attach(model, device="4MiB", block_size=16, store=store)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu_watermark": "0.8"}, "gpu_watermark '0.8' is no number"),
        ({"gpu_watermark": 1.5}, "use a number above 0 and up to 1"),
        ({"prefetch_window": 2.5}, "prefetch_window 2.5 is no whole number"),
        ({"cold_form": "fp4"}, "cold_form 'fp4' is not known; use one of: none, lossless, fp8"),
        ({"admission": None}, "admission None is not known; use one of: always, reused"),
        ({"cold_below": -1}, "cold_below -1"),
    ],
)
def test_transfer_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransferOptions(**options)


def test_transfer_options_take_names() -> None:
    options = TransferOptions(cold_form="fp8", admission="reused", restoring="whole")  # type: ignore[arg-type]
    assert (options.cold_form, options.admission, options.restoring) == (
        ColdForm.FP8,
        Admission.REUSED,
        Restoring.WHOLE,
    )
