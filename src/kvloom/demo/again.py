"""The end of the demo: another process answers with what this one left in a disk store.

``python -m kvloom.demo.again DIR FD`` is that other process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvloom.demo.compare import ANSWER_TOKENS
from kvloom.demo.result import NewProcess, grade_name
from kvloom.errors import StoreError
from kvloom.tiers.disk import DiskStore
from kvloom.types import Grade

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from kvloom.demo.steps import Steps
    from kvloom.engine.answers import Answer

_STORE, _ASKED = "store", "asked.json"
_STORE_BYTES = 512 << 20
_SECONDS = 600
"""How long the other process may take."""
KEEP, ANSWER = 10.0, 20.0
"""Weights of the steps."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question about a document: ``ids``, of which the first ``document_tokens`` are the document's."""

    question: str
    ids: list[int]
    document_tokens: int


def answer_from_disk(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    device: int,
    prompt: Prompt,
    cold: Answer,
    steps: Steps,
    directory: Path,
) -> NewProcess:
    """Keep the document of a prompt in a store in ``directory``; a new process answers; compare that with ``cold``.

    ``device`` is the cap of both device tiers in bytes.  What does not work is said in the result.
    """
    steps.begin("keeping the document on disk", KEEP)
    try:
        stored = _keep(model, device, prompt, steps, directory / _STORE)
        asked = {"prompt": prompt.ids, "device": device}
        (directory / _ASKED).write_text(json.dumps(asked), encoding="utf-8")
    except (OSError, StoreError) as error:
        return NewProcess(problem=f"the document could not be kept on disk: {error}")
    steps.begin("a new process answers from disk", ANSWER)
    try:
        found = _start(directory)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return NewProcess(problem=f"the new process did not answer: {error}")
    return NewProcess(
        question=prompt.question,
        answer=str(tokenizer.decode(found["tokens"], skip_special_tokens=True)).strip(),
        prompt_tokens=len(prompt.ids),
        reused_tokens=found["reused_tokens"],
        grade=found["grade"],
        bytes_stored=stored,
        bytes_loaded=found["bytes_loaded"],
        ttft_cold_s=cold.ttft_s,
        ttft_s=found["ttft_s"],
        identical=tuple(found["tokens"]) == cold.tokens and found["first_logits"] == logits_digest(cold),
    )


def logits_digest(answer: Answer) -> str:
    """Names the first logits of an answer by their bytes."""
    return hashlib.blake2b(answer.first_logits.contiguous().numpy(force=True).tobytes()).hexdigest()


def _keep(model: PreTrainedModel, device: int, prompt: Prompt, steps: Steps, store: Path) -> int:
    """Compute the whole segments of a document and store them; returns the bytes.  Raises StoreError, OSError."""
    from kvloom.adapters.transformers import attach

    ids = prompt.ids[: prompt.document_tokens]
    with DiskStore.open(store, _STORE_BYTES) as opened, attach(model, device=device, store=opened) as engine:
        segment = engine.spec.segment_tokens
        end = len(ids) // segment * segment
        with engine.open(ids, floor=Grade.CANONICAL) as session:
            session.advance(end, lambda length: steps.within(length / end))
        assert engine.cold is not None
        stats = engine.cold.stats
    if stats.not_stored:  # closing the engine waited for what was being stored
        raise StoreError(opened.activity().reason or "there is no room in the store")
    return sum(stats.bytes_stored.values())


def _start(directory: Path) -> dict[str, Any]:
    """What the other process printed.  Raises OSError, SubprocessError, ValueError."""
    alive, held = os.pipe()  # the other process ends when this one does
    command = [sys.executable, "-m", "kvloom.demo.again", str(directory), str(alive)]
    try:
        done = subprocess.run(  # noqa: S603  (a module of ours)
            command, pass_fds=(alive,), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    finally:
        os.close(alive)
        os.close(held)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ValueError(f"exit code {done.returncode}: {lines[-1] if lines else 'it said nothing'}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -------------------------------------------------------------------- the other process


def main(arguments: Sequence[str]) -> None:
    """Answer the prompt in a directory with the store there, and print what was found as JSON."""
    directory, alive = Path(arguments[0]), int(arguments[1])
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    asked = json.loads((directory / _ASKED).read_text(encoding="utf-8"))

    from kvloom.adapters.transformers import attach
    from kvloom.demo import smollm2
    from kvloom.engine.answers import answer

    prompt, model = asked["prompt"], smollm2.load_model()
    with DiskStore.open(directory / _STORE) as store, attach(model, device=asked["device"], store=store) as engine:
        # Once before anything is timed, like everything in the demo: the weights are digested, code is loaded.
        with engine.open(prompt[:40], salt=b"warm up") as session:
            answer(session, count=2, started=perf_counter())
        started = perf_counter()
        with engine.open(prompt, floor=Grade.CANONICAL) as session:
            got = answer(session, count=ANSWER_TOKENS, started=started)
            found = {
                "tokens": got.tokens,
                "first_logits": logits_digest(got),
                "ttft_s": got.ttft_s,
                "reused_tokens": session.reused,
                "grade": grade_name(session.explanation.grade),
            }
        assert engine.cold is not None
        found["bytes_loaded"] = sum(engine.cold.stats.bytes_loaded.values())
    sys.stdout.write(json.dumps(found) + "\n")


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)  # nobody writes: it returns when the other end is closed
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
