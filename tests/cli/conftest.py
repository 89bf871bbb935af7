"""A tiny hybrid model with a tokenizer, saved to a directory as a user would have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvloom.cli.app import app

if TYPE_CHECKING:
    from click.testing import Result

Invoke = Callable[..., "Result"]

CHARACTERS = [chr(c) for c in range(32, 127)]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model of a family, made once."""
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvloom.testing.families import random_model, tiny_config

    @functools.cache
    def made(family: str) -> Path:
        path = tmp_path_factory.mktemp(f"tiny-{family}")
        random_model(tiny_config(family), seed=0).save_pretrained(path)
        vocabulary = {c: i for i, c in enumerate([*CHARACTERS, "\n", "<unk>"])}
        words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
        return path

    return made


@pytest.fixture(scope="session")
def model_dir(model_of: Callable[[str], Path]) -> Path:
    return model_of("gpt_oss")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and then it rests. " * 8, encoding="utf-8")
    return path
