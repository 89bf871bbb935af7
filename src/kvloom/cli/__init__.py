"""The ``kvloom`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (``sys.argv`` by default) and exit with its code."""
    try:
        from kvloom.cli.app import app

        app(args=None if arguments is None else list(arguments), prog_name="kvloom")
    except KeyboardInterrupt:  # while still importing or parsing
        print("error: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
