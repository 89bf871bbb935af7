"""``kvloom verify-model``: settings first, then the command of the verification package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvloom.cli.failures import complain
from kvloom.cli.streams import emit, say
from kvloom.cli.warmup import ensure_compiled
from kvloom.errors import InputError


def verify(model: str, settings: Callable[[], Mapping[str, Any]], *, as_json: bool, **options: Any) -> int:
    """Run the command; a setting that cannot be used is reported like any other bad input.

    ``settings`` and ``options`` are those of ``verify_command``; ``settings`` is asked here, as it may refuse.
    """
    from kvloom.verification.command import refuse, verify_command
    from kvloom.verification.report import Report

    try:
        given = settings()
    except InputError as error:
        report = Report(model=model)
        return refuse(report, type(error).__name__, str(error), as_json=as_json, write=emit, tell=_tell)
    ensure_compiled()
    return verify_command(model, **given, as_json=as_json, write=emit, tell=_tell, **options)


def _tell(line: str) -> None:
    kind, _, rest = line.partition(": ")
    if kind == "error":
        complain(rest)
    else:
        say(f"kvloom: {line}")
