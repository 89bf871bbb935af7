"""What happens around a session: edited weights, a second engine, copies, Ctrl-C at any moment."""

from __future__ import annotations

import copy
import random
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("transformers")

import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers import Engine, attach
from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.errors import ConfigError, UnsupportedError
from kvloom.testing.families import random_model, tiny_config
from kvloom.types import Grade
from kvloom.verification.cold import canonical_chunks, run_cold

IDS = torch.arange(100)[None] % 200


def engine_on(model: PreTrainedModel) -> Engine:
    return attach(model, device="8MiB", block_size=16, segment=32, snapshot_interval=32)


def reused(engine: Engine) -> int:
    with engine.open(IDS, floor=Grade.CANONICAL) as session:
        found = session.reused
        session.prefill()
    return found


def swap_parameter(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].input_layernorm.weight
    model.model.layers[0].input_layernorm.weight = torch.nn.Parameter(weight.detach() * 1.5)


def swap_data(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].input_layernorm.weight
    weight.data = weight.data * 1.5


def edit_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.5)


def hook_a_part(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


@pytest.mark.parametrize("edit", [swap_parameter, swap_data, edit_in_place, hook_a_part])
def test_state_of_other_weights_is_a_miss(edit: Callable[[PreTrainedModel], None]) -> None:
    model = random_model(tiny_config("llama"), seed=0)
    with engine_on(model) as engine:
        assert reused(engine) == 0
        assert reused(engine) == 96
        edit(model)
        assert reused(engine) == 0


def test_weights_written_behind_torchs_back_miss_once_it_is_said() -> None:
    model = random_model(tiny_config("llama"), seed=0)
    with engine_on(model) as engine:
        assert (reused(engine), reused(engine)) == (0, 96)
        before = model.model.layers[0].input_layernorm.weight
        version = before._version
        before.data.mul_(1.5)
        assert before._version == version, "torch counts such writes now: weights_changed is not needed any more"
        engine.weights_changed()
        with engine.open(IDS) as session:
            assert session.reused == 0
            session.prefill()
            warm = forward_chunk(model, IDS[:, 99:], session.cache, 99)[0]
        cold = run_cold(model, IDS, canonical_chunks(100, 32)).logits[-1]
        assert torch.equal(warm, cold)
        assert reused(engine) == 96


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v4"])
def test_two_engines_on_one_model(family: str) -> None:
    model = random_model(tiny_config(family), seed=0)
    with engine_on(model) as first, engine_on(model) as second:
        answers = []
        for engine in (first, second, first, second):
            with engine.open(IDS) as session:
                out = model.generate(IDS, past_key_values=session.prefill(), max_new_tokens=4, do_sample=False)
                answers.append(out.tolist())
        assert answers.count(answers[0]) == 4
        first.manager.check_integrity()
        second.manager.check_integrity()


def test_copies_of_engines_and_sessions_are_refused() -> None:
    with engine_on(random_model(tiny_config("llama"), seed=0)) as engine, engine.open(IDS) as session:
        for thing in (engine, session):
            with pytest.raises(UnsupportedError, match="copying"):
                copy.deepcopy(thing)
            with pytest.raises(UnsupportedError, match="copying"):
                copy.copy(thing)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_an_interrupt_at_any_moment_leaves_whole_books(family: str) -> None:
    model = random_model(tiny_config(family), seed=0)
    draw = random.Random(0)
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    interrupted = 0
    try:
        with engine_on(model) as engine:
            reused(engine)
            for turn in range(40):
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 0.03))
                        with engine.open(IDS, salt=bytes([turn])) as session:
                            session.prefill()
                            session.fork().close()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                engine.close_dropped()
                engine.manager.check_integrity()
                assert engine.manager.in_use() == 0
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.signal(signal.SIGINT, heard)
    assert interrupted


def test_compiled_code_needs_no_place_on_disk() -> None:
    code = (
        "import numba.core.caching as caching; caching.CacheImpl._locator_classes = []; "
        "import kvloom.tiers.rows, kvloom.manager"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "999TiB"}, "device: this machine cannot give a tier of 999TiB"),
        ({"device": "9999TiB"}, "1024 TiB"),
        ({"device": 2**70}, "1024 TiB"),
        ({"device": "4MiB", "host": "999TiB"}, "host: this machine cannot give a tier of 999TiB"),
    ],
)
def test_more_than_the_machine_has_is_a_typed_error(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(random_model(tiny_config("llama"), seed=0), **options)
