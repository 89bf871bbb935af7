"""One warm answer beside the two cold runs it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from kvloom.demo.result import Row, grade_name
from kvloom.engine.answers import Answer, answer, cold_chunked, cold_oneshot, prefill_chunks

if TYPE_CHECKING:
    from kvloom.adapters.transformers import Engine, Session
    from kvloom.demo.steps import Steps
    from kvloom.types import Grade

Decode = Callable[[Sequence[int]], str]
ANSWER_TOKENS = 32
_WARM, _ONESHOT, _CHUNKED = 0.15, 0.4, 0.45
"""How the time of one comparison splits up."""


class Comparison:
    """Answers prompts warm on one engine, then cold, and keeps a row for each.

    Args:
        engine: the attached model.
        decode: generated ids to the text that is shown.
        steps: told what is being done.
        weight: of one comparison among the steps.
    """

    def __init__(self, engine: Engine, decode: Decode, steps: Steps, weight: float) -> None:
        self.engine = engine
        self.rows: list[Row] = []
        self.cold: list[Answer] = []
        """The chunked cold answer of every row."""
        self._decode = decode
        self._steps = steps
        self._weight = weight

    def ask(self, step: str, question: str, prompt: Sequence[int], floor: Grade) -> None:
        """Open a session, answer, close it; then the cold runs."""
        self._begin(f"{step}: {question}", _WARM)
        started = perf_counter()
        with self.engine.open(prompt, floor=floor) as session:
            warm = answer(session, count=ANSWER_TOKENS, started=started)
            self._row(step, question, session, warm)

    def fork(self, question: str, prompt: Sequence[int], begins: str, longer: Sequence[int], floor: Grade) -> None:
        """Fork a session just before it answers ``prompt``; the child's answer is begun with ``begins``.

        ``longer`` is the child's prompt.  The child answers first, so that a child that disturbed its parent
        would show in the parent's answer.
        """
        self._begin(f"fork: {question}", _WARM)
        started = perf_counter()
        with self.engine.open(prompt, floor=floor) as parent:
            parent.prefill()
            prepared = perf_counter() - started
            started = perf_counter()
            with parent.fork(longer) as child:
                shared = child.length
                warm = answer(child, count=ANSWER_TOKENS, started=started)
                self._row("fork", f"{question} [answer begun with: {begins}]", child, warm, fork_at=shared)
            self._begin(f"parent of the fork: {question}", _WARM)
            warm = answer(parent, count=ANSWER_TOKENS, started=perf_counter() - prepared)
            self._row("question", question, parent, warm)

    def _begin(self, what: str, share: float) -> None:
        self._steps.begin(what, share * self._weight)

    def _row(self, step: str, question: str, session: Session, warm: Answer, *, fork_at: int | None = None) -> None:
        ids = session.tokens.tolist()
        self._begin(f"{step}: the same by transformers alone, in one shot", _ONESHOT)
        oneshot = cold_oneshot(session.model, ids)
        self._begin(f"{step}: the same by transformers alone, in chunks", _CHUNKED)
        chunks = prefill_chunks(len(ids), self.engine.spec.segment_tokens, () if fork_at is None else (fork_at,))
        cold = cold_chunked(session.model, ids, chunks, count=ANSWER_TOKENS)
        self.cold.append(cold)
        found = session.explanation
        # A fork goes on from its parent's state, which its lookup never saw.
        hit, grade = (found.boundary, found.grade) if fork_at is None else (fork_at, session.grade)
        self.rows.append(
            Row(
                step=step,
                question=question,
                answer=self._decode(warm.tokens),
                prompt_tokens=len(ids),
                reused_tokens=hit,
                grade=grade_name(grade),
                ttft_cold_oneshot_s=oneshot.ttft_s,
                ttft_cold_s=cold.ttft_s,
                ttft_warm_s=warm.ttft_s,
                identical=len(warm.tokens) >= ANSWER_TOKENS and warm.same_as(cold),
                generated=len(warm.tokens),
            )
        )
