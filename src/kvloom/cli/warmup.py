"""``kvloom warmup``, and the same before the first command that needs the compiled core."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import typer

from kvloom.cli.failures import guarded
from kvloom.cli.streams import emit, emit_json, progress, say

_NO_CACHE = (
    "no folder for compiled code is writable, so every process compiles anew; set NUMBA_CACHE_DIR to one that is"
)


@guarded
def warmup(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Compile everything that is compiled on first use, for instance while a container image is built."""
    from kvloom.core import compiled
    from kvloom.kernels import warmup as forms
    from kvloom.manager.warmup import warm_up
    from kvloom.tiers.hashing import many
    from kvloom.tiers.host import warmup as host

    started = perf_counter()
    folder = compiled.cache_folder()
    with progress().status("compiling the core"):
        count = warm_up() + forms.warm_up() + host.warm_up() + many.warm_up()
    seconds = perf_counter() - started
    if folder is None:
        say(f"kvloom: note: {_NO_CACHE}")
    if as_json:
        emit_json({"compiled": count, "seconds": round(seconds, 3), "cache": folder})
    elif count:
        emit(f"compiled {count} functions in {seconds:.1f} s" + (f", kept in {folder}" if folder else ""))
    else:
        emit(f"nothing to do: everything is compiled, in {folder}")
    return 0


def ensure_compiled() -> None:
    """Compile the core now, and say so, if this installation has not done so yet."""
    from kvloom.core import compiled

    if compiled.cache_folder() is None:
        say(f"kvloom: note: compiling as needed: {_NO_CACHE}")
    elif not compiled.complete():
        from kvloom.manager.warmup import warm_up

        say("kvloom: note: compiling the core, once per installation: two to three minutes (kvloom warmup does it too)")
        with progress().status("compiling the core"):
            warm_up()
