"""Configuration as a command sees it: file, environment, flags; and what has to be said about it, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from kvloom.config import CacheConfig
from kvloom.errors import ConfigError


def load_settings(path: Path | None, flags: Mapping[str, Any]) -> CacheConfig:
    """Defaults < the YAML file at ``path`` < ``KVLOOM_...`` < flags that were given; notices go to stderr.

    Raises ConfigError that names the field and the fix.
    """
    settings = CacheConfig.load(
        "" if path is None else _read(path),
        environ=os.environ,
        flags=flags,
        source="settings" if path is None else str(path),
    )
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for notice in settings.notices():
        console.print(f"note: {notice}")
    return settings


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {path}: not UTF-8 text") from None
