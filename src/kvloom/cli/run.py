"""``kvloom run``: questions about one document, on a model in process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.cli import cold, streams
from kvloom.cli.run_report import explanation_json, print_answer, print_head, ranges_json
from kvloom.cli.warmup import ensure_compiled
from kvloom.config import CacheConfig, exact_size, format_size
from kvloom.demo.result import grade_name, kind_rows
from kvloom.engine.memory import require_tier
from kvloom.engine.prompts import DocumentPrompts, read_document
from kvloom.errors import CapacityError, InputError
from kvloom.eviction import find_policy
from kvloom.replay.recorder import Recorder, require_target

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvloom.adapters.transformers import Engine
    from kvloom.tiers.disk import DiskStore
    from kvloom.types import Grade

SMOLLM2 = "smollm2"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asked for; ``settings`` is defaults, file, environment and flags together."""

    model: str
    document: Path
    questions: tuple[str, ...]
    settings: CacheConfig
    max_new_tokens: int
    segment: int | None
    dtype: str | None
    on: str | None
    policy: str
    record: Path | None
    force: bool
    store: Path | None
    store_size: int | None
    explain: bool
    as_json: bool


def run_command(options: RunOptions) -> int:
    """Answer every question; prints a report and returns the exit code."""
    text = read_document(options.document)  # before minutes of loading
    find_policy(options.policy)
    if options.record is not None:
        require_target(options.record, force=options.force)
    elif options.force:
        raise InputError("--force replaces the file of --record FILE, which is not given; leave it out")
    if options.record is not None and (options.store is not None or options.settings.host is not None):
        raise InputError("what comes from a colder tier cannot be recorded; give --record, or --host and --store")
    for question in options.questions:
        if not question.strip():
            raise InputError("a question is empty; write what you want to ask after --question")
    with cold.opened(options.store, options.store_size) as store:
        report = _run(options, text, store)
    if options.as_json:
        streams.emit_json(report)
    return 0


def _run(options: RunOptions, text: str, store: DiskStore | None) -> dict[str, Any]:
    console, status = streams.screen(soft_wrap=True), streams.progress()
    with status.status(f"loading {escape(options.model)}"):
        model, tokenizer = load(options.model, options.dtype, options.on)
    prompts = DocumentPrompts.make(tokenizer, text)
    asked = [(question, prompts.ask(question)) for question in options.questions]

    from kvloom.adapters.transformers import attach

    ensure_compiled()
    settings = options.settings
    require_tier(settings.device, model.device)
    with (
        _recorder(options) as recorder,
        attach(
            model,
            device=settings.device,
            block_size=settings.block_size,
            segment=options.segment,
            policy=options.policy,
            watch=recorder,
            host=settings.host,
            store=store,
            transfers=cold.transfer_options(settings),
            replay="off" if recorder is not None else "auto",
        ) as engine,
    ):
        _check_written(recorder)
        _check_fit(engine, max(len(ids) for _, ids in asked), options.max_new_tokens)
        read = read_into_cache(engine, prompts.document_ids, settings.default_floor, status, explain=options.explain)
        _check_written(recorder)
        report: dict[str, Any] = {
            "model": options.model,
            "floor": grade_name(settings.default_floor),
            "policy": options.policy,
            "device_cap_bytes": engine.manager.cap,
            "segment_tokens": engine.spec.segment_tokens,
            "document": {"path": str(options.document), "tokens": len(prompts.document_ids), **read},
            "answers": [],
        }
        if not options.as_json:
            print_head(console, report)
        for number, (question, ids) in enumerate(asked):
            if number + 1 < len(asked):  # what it will want from colder tiers comes while this one is answered
                engine.prefetch(asked[number + 1][1], floor=settings.default_floor)
            with status.status("answering"):
                answer = _answer(engine, tokenizer, question, ids, options)
            report["answers"].append(answer)
            if not options.as_json:
                print_answer(console, answer)
            _check_written(recorder)
        tiers, recoverer = engine.cold, engine.recoverer
        engine.close()
        stats = engine.manager.stats()
        report["kinds"] = {
            name: {"hits": k.hits, "misses": k.misses, "evictions": k.evictions, "bytes": k.bytes}
            for name, k in kind_rows(stats).items()
        }
        if recorder is not None:
            recorder.end(stats)
        report["recovery"] = None if recoverer is None else recoverer.recovery.to_json()
        report["tiers"] = None if tiers is None else tiers.stats.to_json()
        report["forms"] = [] if tiers is None else cold.forms_report(tiers)
        report["store"] = None
        if tiers is not None and store is not None:
            report["store"] = cold.store_report(tiers, store, kind_rows(stats))
        if tiers is not None and not options.as_json:
            names = cold.heads(settings.host, options.store, store)
            console.print(escape("\n".join(cold.tier_lines(report, names, explain=options.explain))))
    return report


def _recorder(options: RunOptions) -> AbstractContextManager[Recorder | None]:
    """What writes the recording that was asked for."""
    return nullcontext() if options.record is None else Recorder(options.record, force=options.force)


def _check_written(recorder: Recorder | None) -> None:
    """Say soon, not at the end of a long run, that its recording ends here."""
    if recorder is not None:
        recorder.require_written()


def load(name: str, dtype: str | None, on: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of ``smollm2`` or of a directory; nothing is fetched.  Raises InputError.

    ``on`` is the torch device to compute on; None takes CUDA where there is one.
    """
    if name.lower() == SMOLLM2:
        from kvloom.demo import weights

        weights.require()

    import torch

    device = on or ("cuda" if torch.cuda.is_available() else "cpu")
    from kvloom.verification.command import load_model, require_device

    if name.lower() == SMOLLM2:
        from kvloom.demo import smollm2

        if dtype not in (None, "float32"):
            raise InputError(f"--dtype {dtype!r}: smollm2 runs in float32; leave --dtype out")
        require_device(device, "--on")
        return smollm2.load_model().to(device), weights.tokenizer()

    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # stderr belongs to our own progress
    model = load_model(name, dtype=dtype, device=device, option="--on")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{name}: transformers cannot load a tokenizer from it: {reason}") from None
    return model, tokenizer


def read_into_cache(
    engine: Engine, ids: tuple[int, ...], floor: Grade, status: Console, *, explain: bool = False
) -> dict[str, Any]:
    """Compute the document's state in canonical chunks and commit it.

    Returns the ``seconds`` it took, the ``reused_tokens``, and the ``restored_bytes`` that came from colder tiers; to
    ``explain`` also what the lookup found.  A floor below canonical also keeps the exact end of the document resumable.
    """
    from kvloom.types import Grade

    started = perf_counter()
    segment = engine.spec.segment_tokens
    end = len(ids) // segment * segment if floor is Grade.CANONICAL else len(ids)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"))
    with (
        Progress(
            *columns, TimeElapsedColumn(), console=status, transient=True, disable=not status.is_terminal
        ) as progress,
        engine.open(ids, floor=floor) as session,
    ):
        task = progress.add_task("reading the document", total=max(end, 1))
        session.advance(end, lambda length: progress.update(task, completed=length))
        read: dict[str, Any] = {"reused_tokens": session.reused, "restored_bytes": cold.loaded(engine.cold)}
        if explain:
            read["explanation"] = explanation_json(session.explanation)
    return {"seconds": perf_counter() - started, **read}


def _check_fit(engine: Engine, prompt: int, new: int) -> None:
    limit = engine.spec.max_positions
    if limit and prompt + new > limit:
        raise InputError(
            f"the longest prompt has {prompt} tokens, and an answer may have {new}, but the model allows {limit} "
            "together; use a shorter document or a smaller --max-new-tokens"
        )
    needed, cap = engine.manager.tier_needed(prompt + new), engine.manager.cap
    if needed > cap:
        raise CapacityError(
            f"--device {exact_size(cap)}: a prompt of {prompt} tokens with an answer of up to {new} needs "
            f"{format_size(needed)}; use --device {exact_size(-(-needed // 1024) * 1024)} or more",
            needed=needed,
            cap=cap,
            in_use=engine.manager.in_use(),
            never_fits=True,
        )


def _answer(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, question: str, ids: list[int], options: RunOptions
) -> dict[str, Any]:
    from kvloom.engine.answers import answer

    stop = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    started, before = perf_counter(), cold.loaded(engine.cold)
    with engine.open(ids, floor=options.settings.default_floor) as session:
        got = answer(session, count=options.max_new_tokens, started=started, stop_at=stop)
        found = session.explanation
        report: dict[str, Any] = {
            "question": question,
            "answer": str(tokenizer.decode(got.tokens, skip_special_tokens=True)).strip(),
            "prompt_tokens": len(ids),
            "reused_tokens": session.reused,
            "restored_bytes": cold.loaded(engine.cold) - before,
            "grade": grade_name(found.grade),
            "ttft_s": got.ttft_s,
            "generated_tokens": len(got.tokens),
        }
        if options.explain:
            report["explanation"] = explanation_json(found)
            report["ranges"] = ranges_json(session.ranges())
        return report
