"""Configuration as a command sees it: file, environment, flags; and what has to be said about it, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.cli.streams import say
from kvloom.config import CacheConfig
from kvloom.engine.files import read_text
from kvloom.errors import ConfigError


def load_settings(path: Path | None, flags: Mapping[str, Any]) -> CacheConfig:
    """Defaults < the YAML file at ``path`` < ``KVLOOM_...`` < flags that were given; notices go to stderr.

    Raises ConfigError that names the field and the fix.
    """
    settings = CacheConfig.load(
        "" if path is None else read_text(path, "config", error=ConfigError),
        environ=os.environ,
        flags=flags,
        source="settings" if path is None else str(path),
    )
    for notice in settings.notices():
        say(f"kvloom: note: {notice}")
    return settings
