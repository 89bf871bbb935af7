"""How a command ends: one line on stderr and an exit code for what went wrong on purpose, 70 for a bug."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from kvloom.errors import KVLoomError, MissingExtraError

P = ParamSpec("P")

EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
_TORCH_EXTRA = ("torch", "transformers", "tokenizers", "safetensors")
_DEMO_EXTRA = ("gguf",)


def complain(message: str) -> None:
    """One line on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]error:[/] {_one_line(message)}", markup=True
    )


def _one_line(message: str) -> str:
    return " ".join(message.split()).replace("[", r"\[")


def missing_extra(error: ImportError) -> MissingExtraError | None:
    """The error to show for an optional package that is not installed; None when the import failed otherwise."""
    root = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError):
        return None
    if root in _TORCH_EXTRA:
        return MissingExtraError(f"this needs {root}, which is not installed; run: pip install 'kvloom[transformers]'")
    if root in _DEMO_EXTRA:
        return MissingExtraError(f"this needs {root}, which is not installed; run: pip install 'kvloom[demo]'")
    return None


def guarded(command: Callable[P, int]) -> Callable[P, None]:
    """A command whose result is the exit code, and whose exceptions become one line and an exit code.

    2: bad input, anything that kvloom raises on purpose, or an optional package that is missing.
    70: a bug, with its traceback.  130: Ctrl-C.  141: the reader of stdout went away.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(_outcome(lambda: command(*args, **kwargs)))

    return run


def _outcome(call: Callable[[], int]) -> int:
    try:
        return call()
    except KVLoomError as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; keep the interpreter from complaining about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except typer.Exit:
        raise
    except Exception as error:  # the last line of defence: a bug must not look like bad input
        known = missing_extra(error) if isinstance(error, ImportError) else None
        if known is not None:
            complain(str(known))
            return EXIT_BAD_INPUT
        traceback.print_exc()
        complain(f"internal error in kvloom: {type(error).__name__}: {error}")
        return EXIT_INTERNAL
