"""The result of a run as one JSON object, with the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvloom.bench.core.rows import Row, growth
from kvloom.bench.core.run import Settings
from kvloom.bench.core.sides import Local, Side
from kvloom.errors import InputError


def machine() -> dict[str, Any]:
    """What the times depend on: processor, cores, Python, NumPy and Numba."""
    import numba
    import numpy as np

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report(settings: Settings, sides: Sequence[Side], versions: dict[str, str], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything about a run as plain values."""
    own = sides[0]
    return {
        "machine": machine(),
        "clock": "CPU time of the thread, microseconds; spread is the 10th to the 90th percentile",
        "versions": versions,
        "settings": asdict(settings),
        "rows": [row.to_json() for row in rows],
        "growth": growth(rows),
        "memory": own.memory if isinstance(own, Local) else [],
    }


def require_writable(path: Path | None) -> None:
    """InputError, before anything is measured, when a report cannot be written to the file of ``--output``."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--output {path}: a directory; name a file")
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"--output {path}: cannot write there ({reason}); name a file in a folder that is writable"
        ) from None


def write(path: Path, result: dict[str, Any]) -> None:
    """One JSON file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
