"""How a command ends: one line on stderr and an exit code for what went wrong on purpose, 70 for a bug."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from kvloom.cli.interrupts import EXIT_INTERRUPTED
from kvloom.cli.streams import UNWRITABLE, drop_output, emit_json, progress
from kvloom.errors import KVLoomError, MissingExtraError

P = ParamSpec("P")

EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 70
EXIT_OUTPUT = 74
EXIT_PIPE = 141
_TORCH_EXTRA = ("torch", "transformers", "tokenizers", "safetensors")
_DEMO_EXTRA = ("gguf",)


def complain(message: str) -> None:
    """One line on stderr, if there is anybody to read it."""
    try:
        progress().print(f"kvloom: [bold red]error:[/] {_one_line(message)}", markup=True, soft_wrap=True)
    except OSError:
        drop_output()


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


def error_object(kind: str, message: str, code: int) -> dict[str, Any]:
    """What ``--json`` prints instead of a result."""
    return {"error": {"type": kind, "message": " ".join(message.split()), "exit_code": code}}


def guarded(command: Callable[P, int]) -> Callable[P, None]:
    """A command whose result is the exit code, and whose exceptions become one line and an exit code.

    2: bad input, anything that kvloom raises on purpose, or an optional package that is missing.
    70: a bug, with its traceback.  74: stdout cannot be written.  130: Ctrl-C.  141: the reader of stdout went away.
    With ``as_json`` 2 and 70 also print an error object on stdout.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(outcome(lambda: command(*args, **kwargs), as_json=bool(kwargs.get("as_json"))))

    return run


def outcome(call: Callable[[], int], *, as_json: bool) -> int:
    """The exit code of ``call``, after what has to be said about it; see ``guarded``."""
    try:
        try:
            code = call()
        except KVLoomError as error:
            code = report(type(error).__name__, str(error), EXIT_BAD_INPUT, as_json=as_json)
        except MemoryError as error:
            message = (
                f"this machine has not enough memory ({str(error) or 'out of memory'}); use a smaller --device or model"
            )
            code = report("MemoryError", message, EXIT_BAD_INPUT, as_json=as_json)
        except (KeyboardInterrupt, typer.Exit, OSError):
            raise
        except Exception as error:  # the last line of defence: a bug must not look like bad input
            code = _unexpected(error, as_json=as_json)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return EXIT_PIPE
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            return _unexpected(error, as_json=as_json)
        drop_output()
        complain(f"cannot write the output: {error.strerror}; free some room, or write elsewhere")
        return EXIT_OUTPUT
    return code


def report(kind: str, message: str, code: int, *, as_json: bool) -> int:
    """Say what went wrong, on stderr and with ``as_json`` also on stdout; returns ``code``."""
    complain(message)
    if as_json:
        emit_json(error_object(kind, message, code))
    return code


def _unexpected(error: Exception, *, as_json: bool) -> int:
    known = missing_extra(error) if isinstance(error, ImportError) else None
    if known is not None:
        return report("MissingExtraError", str(known), EXIT_BAD_INPUT, as_json=as_json)
    traceback.print_exception(error)
    message = f"internal error in kvloom: {type(error).__name__}: {error}"
    return report(type(error).__name__, message, EXIT_INTERNAL, as_json=as_json)
