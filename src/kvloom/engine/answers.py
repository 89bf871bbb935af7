"""Greedy answers with their time to first token, by ``generate`` on any transformers cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from kvloom.adapters.transformers.forward import forward_chunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from kvloom.adapters.transformers import Session

Chunk = tuple[int, int]
OnToken = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered.

    Attributes:
        tokens: generated ids.
        first_logits: logits of the first generated token, ``[vocab]``, in the model's dtype.
        ttft_s: wall seconds from the call to the first token.
    """

    tokens: tuple[int, ...]
    first_logits: torch.Tensor
    ttft_s: float

    def same_as(self, other: Answer) -> bool:
        """True when every token is the same and the first logits are equal bit for bit."""
        return self.tokens == other.tokens and torch.equal(self.first_logits, other.first_logits)


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when the first token arrives.  ``generate`` first hands over the prompt, then token by token."""

    def __init__(self, on_token: OnToken | None) -> None:
        self.first: float | None = None
        self._prompt_seen = False
        self._on_token = on_token

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first is None:
            self.first = perf_counter()
        if self._on_token is not None:
            self._on_token(int(value.reshape(-1)[0]))

    def end(self) -> None:
        """Nothing is buffered."""


def generate(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    cache: Cache | None,
    *,
    count: int,
    started: float,
    stop_at: Sequence[int] = (),
    on_token: OnToken | None = None,
) -> Answer:
    """Greedy ``generate`` of at most ``count`` tokens; ``cache`` may hold all but the last prompt token.

    Args:
        started: ``perf_counter()`` when the call began for whoever waits for the answer.
        stop_at: ids that end the answer; without any, exactly ``count`` tokens are made.
        on_token: told each token as it comes.
    """
    clock = _Clock(on_token)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=list(stop_at) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = torch.tensor([list(token_ids)], device=model.device)
    extra: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    out = model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids), streamer=clock, **extra)
    tokens = tuple(int(t) for t in out.sequences[0, ids.shape[1] :])
    return Answer(tokens, out.logits[0][0].clone(), (clock.first or perf_counter()) - started)


def answer(
    session: Session,
    *,
    count: int,
    started: float,
    stop_at: Sequence[int] = (),
    on_token: OnToken | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Answer:
    """Compute what a session's prompt lacks, in canonical chunks, then answer greedily.

    ``on_progress`` is told the number of prompt tokens whose state is there.
    """
    session.prefill(on_progress)
    ids = session.tokens.tolist()
    return generate(session.model, ids, session.cache, count=count, started=started, stop_at=stop_at, on_token=on_token)


def cold_oneshot(model: PreTrainedModel, token_ids: Sequence[int], *, count: int = 1) -> Answer:
    """transformers' own ``generate``: the whole prompt in one forward."""
    return generate(model, token_ids, None, count=count, started=perf_counter())


def cold_chunked(model: PreTrainedModel, token_ids: Sequence[int], chunks: Sequence[Chunk], *, count: int) -> Answer:
    """transformers' own cache, filled by ``chunks`` (all but the last token), then ``generate``."""
    started = perf_counter()
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(token_ids)], device=model.device)
    for start, end in chunks:
        forward_chunk(model, ids[:, start:end], cache, start)
    return generate(model, token_ids, cache, count=count, started=started)


def prefill_chunks(tokens: int, segment: int, starts: Sequence[int] = (0,)) -> list[Chunk]:
    """The calls of a canonical prefill of all but the last of ``tokens`` tokens.

    From segment boundary to segment boundary, then the ragged rest.  ``starts`` are positions at which a call
    begins besides those: 0, and where a fork was taken.
    """
    end = tokens - 1
    cuts = sorted({*range(0, end, segment), *(s for s in starts if s < end), end})
    return list(pairwise(cuts))
