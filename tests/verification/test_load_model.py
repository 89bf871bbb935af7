"""Loading what ``verify-model`` and ``run`` are pointed at."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvloom.errors import InputError, SpecError  # noqa: E402
from kvloom.verification.command import load_model  # noqa: E402


def test_a_preset_has_no_weights() -> None:
    with pytest.raises(InputError, match="gpt-oss-20b: a preset has no weights"):
        load_model("gpt-oss-20b")


def test_families_that_only_transformers_knows(tmp_path: Path) -> None:
    transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), random_init=True)
    assert (model.config.model_type, model.training) == ("gpt2", False)
    transformers.MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"layer 0 of mamba: .*recurrent state"):
        load_model(str(tmp_path), random_init=True)
