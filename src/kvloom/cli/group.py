"""The root of the command: what typer would say in four lines about bad usage is said in one, like every error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from kvloom.cli.failures import EXIT_BAD_INPUT, complain, error_object, outcome
from kvloom.cli.streams import emit_json

# Click's class for errors that it shows to users, wherever this version of typer has it.
_SHOWN: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Commands(TyperGroup):
    """All commands."""

    def main(  # type: ignore[override]  # the rest of the signature is for shells that complete
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> int:
        """Run a command line (``sys.argv`` by default); exits with its code, or returns it."""
        extra = {name: value for name, value in extra.items() if name not in ("complete_var", "windows_expand_args")}
        arguments = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in arguments
        code = outcome(lambda: self._run(arguments, prog_name or "kvloom", extra, as_json=as_json), as_json=as_json)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, arguments: list[str], name: str, extra: dict[str, Any], *, as_json: bool) -> int:
        try:
            with self.make_context(name, arguments, **extra) as context:
                self.invoke(context)
        except typer.Exit as ended:
            return ended.exit_code
        except _SHOWN as error:
            return _usage(error, as_json=as_json)
        return 0


def _usage(error: Any, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return EXIT_BAD_INPUT
    message = " ".join(error.format_message().split()).removesuffix(".")
    message = message[:1].lower() + message[1:]
    path = context.command_path if context is not None else "kvloom"
    complain(f"{message}; see {path} --help")
    if as_json:
        what = error_object("UsageError", message, EXIT_BAD_INPUT)
        if context is not None and context.info_name == "verify-model":
            from kvloom.verification.report import Report

            what = {**Report(reason=message).to_json(), "notes": [], **what}
        emit_json(what)
    return EXIT_BAD_INPUT
