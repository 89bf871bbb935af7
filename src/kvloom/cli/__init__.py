"""The ``kvloom`` command."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.cli import interrupts, streams

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (``sys.argv`` by default) and exit with its code."""
    interrupts.install()
    streams.prepare()
    from kvloom.cli.app import app

    app(args=None if arguments is None else list(arguments), prog_name="kvloom")
