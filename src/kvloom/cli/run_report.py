"""What ``kvloom run`` prints: explanations and ranges as JSON values, answers for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from kvloom.config import format_size
from kvloom.demo.result import grade_name
from kvloom.manager.ranges import TokenRange
from kvloom.plan import Explanation, Limit
from kvloom.types import Kind, Reason

if TYPE_CHECKING:
    from rich.console import Console


def explanation_json(found: Explanation) -> dict[str, Any]:
    """An explanation as JSON values; ``kind`` and ``group`` are null where no object is at fault."""
    return {
        "boundary": found.boundary,
        "grade": grade_name(found.grade),
        "prompt_tokens": found.prompt_tokens,
        "known_tokens": found.known_tokens,
        "limits": [
            {
                "reason": limit.reason.value,
                "position": limit.position,
                "tier": limit.tier,
                "kind": limit.kind.name.lower() if limit.kind is not None else None,
                "group": limit.group,
            }
            for limit in found.limits
        ],
    }


def ranges_json(pieces: Sequence[TokenRange]) -> list[dict[str, Any]]:
    """Tokens ``[begin, end)`` per group as JSON values; ``grade`` is null where nothing is held."""
    found: list[dict[str, Any]] = []
    for piece in pieces:
        what = {
            "group": piece.group,
            "kind": piece.kind.name.lower(),
            "begin": piece.start,
            "end": piece.stop,
            "form": piece.form.name.lower(),
            "grade": grade_name(piece.grade),
        }
        last = found[-1] if found else None
        if last is not None and {**last, "begin": piece.start, "end": piece.stop} == what:  # only their states differ
            last["end"] = piece.stop
        else:
            found.append(what)
    return found


def print_head(console: Console, report: dict[str, Any]) -> None:
    """What was read, before the answers."""
    document = report["document"]
    size = format_size(document["restored_bytes"])
    reused = f", {document['reused_tokens']:,} of them restored ({size})" if document["restored_bytes"] else ""
    console.print(
        f"[bold]{escape(report['model'])}[/]: {document['tokens']:,} tokens of {escape(document['path'])} "
        f"read in {document['seconds']:.1f} s{reused}; device cap {format_size(report['device_cap_bytes'])}, "
        f"floor {report['floor']}"
    )
    _print_limits(console, document)
    console.print()


def print_answer(console: Console, answer: dict[str, Any]) -> None:
    """One answer, and what was reused for it."""
    console.print(f"[bold cyan]{escape(answer['question'])}[/]")
    console.print(escape(answer["answer"]))
    hit = f"{answer['grade']} hit" if answer["grade"] else "miss"
    restored = f" ({format_size(answer['restored_bytes'])} restored)" if answer["restored_bytes"] else ""
    console.print(
        f"[dim]{hit}: {answer['reused_tokens']:,} of {answer['prompt_tokens']:,} tokens reused{restored}, "
        f"first token after {answer['ttft_s']:.2f} s[/]"
    )
    _print_limits(console, answer)
    for piece in answer.get("ranges", ()):
        grade = f", {piece['grade']}" if piece["grade"] else ""
        where = f"{piece['kind']} ({piece['group']}), tokens {piece['begin']:,} to {piece['end']:,}"
        console.print(f"[dim]  {escape(where)}: {piece['form']}{grade}[/]")
    console.print()


def _print_limits(console: Console, what: dict[str, Any]) -> None:
    """What stopped the lookup of a document or an answer, where that was asked for."""
    for limit in what.get("explanation", {}).get("limits", ()):
        console.print(f"[dim]  {escape(sentence(limit))}[/]")


def sentence(limit: dict[str, Any]) -> str:
    """A limit of an explanation in words."""
    kind = Kind[limit["kind"].upper()] if limit["kind"] else None
    return str(Limit(Reason(limit["reason"]), limit["position"], limit["tier"], kind, limit["group"]))
