"""Tiny models, engines on them and cold runs to compare with; models are made once per test session."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.core.fields import PINS

if importlib.util.find_spec("transformers") is not None:
    import torch
    from tests.adapter.shop import Shop
    from transformers import DynamicCache, PreTrainedModel

    from kvloom.adapters.transformers import Engine, Session, attach
    from kvloom.adapters.transformers.forward import forward_chunk
    from kvloom.testing.families import random_model, tiny_config
    from kvloom.verification.cold import canonical_chunks, run_cold

BLOCK, SEGMENT = 16, 32


@functools.cache
def cached_model(family: str, dtype: str = "float32") -> PreTrainedModel:
    return random_model(tiny_config(family), dtype=dtype)


class Lab:
    """What most tests need: prompts, engines that close by themselves, cold logits, the next token on a session."""

    block, segment = BLOCK, SEGMENT

    def __init__(self) -> None:
        self._engines: list[Engine] = []

    def model(self, family: str, dtype: str = "float32") -> PreTrainedModel:
        return cached_model(family, dtype)

    def engine(self, family: str, dtype: str = "float32", **options: Any) -> Engine:
        options = {"device": "8MiB", "block_size": BLOCK, "segment": SEGMENT, **options}
        engine = attach(self.model(family, dtype), **options)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._engines:
            for sequence in engine.manager.running():
                sequence.close()
            engine.manager.check_integrity()
            engine.close()

    @staticmethod
    def ids(count: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, 320, (1, count), generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def cold(model: PreTrainedModel, ids: torch.Tensor, segment: int = SEGMENT) -> torch.Tensor:
        """Logits of the last token, by transformers alone, in canonical chunks."""
        return run_cold(model, ids, canonical_chunks(ids.shape[1], segment)).logits[-1]

    @staticmethod
    def cold_cache(model: PreTrainedModel, ids: torch.Tensor, segment: int = SEGMENT) -> DynamicCache:
        """transformers' cache of all tokens but the last, made in canonical chunks."""
        cache = DynamicCache(config=model.config)
        run_cold(model, ids, canonical_chunks(ids.shape[1], segment)[:-1], cache=cache)
        return cache

    @staticmethod
    def last(session: Session, ids: torch.Tensor) -> torch.Tensor:
        """Prefill, run the last token; its logits."""
        session.prefill()
        return forward_chunk(session.model, ids[:, session.length :], session.cache, session.length)[0]

    def answer(self, engine: Engine, ids: torch.Tensor, **options: Any) -> tuple[int, torch.Tensor]:
        """Open, prefill, last token, close: (reused tokens, logits)."""
        with engine.open(ids, **options) as session:
            return session.reused, self.last(session, ids)

    @staticmethod
    def held(engine: Engine) -> int:
        """Slots that are held by sequences or plans."""
        return int((engine.manager.arrays.slot[:, PINS] > 0).sum())


@pytest.fixture
def lab() -> Iterator[Lab]:
    """One thread for tiny models: faster, and the same arithmetic on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)  # an interrupted ``generate`` of an earlier test may have left it off
    lab = Lab()
    yield lab
    lab.close()
    torch.set_num_threads(before)


@pytest.fixture
def shop(lab: Any, fast_path: Path) -> Shop:
    return Shop(lab, fast_path / "store")


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a thing: many stores, to which a sync means nothing."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    made = memory / f"kvloom-test-{os.getpid()}-{tmp_path.name}"
    made.mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)
