"""Reading ``config.json``: the only file access of the spec layer (one whole small file, nothing kept open)."""

from __future__ import annotations

import json
from typing import Any

from kvloom.errors import InputError

MOST_BYTES = 64 << 20


def read_config_file(path: str) -> dict[str, Any]:
    """The JSON object in ``path`` (a file, or a directory that holds ``config.json``).

    Raises:
        InputError: nothing there, unreadable, above 64 MiB, not UTF-8, not JSON, or not a JSON object.
    """
    file, text = _read(path)
    try:
        data = json.loads(text)
    except ValueError as error:  # also a number of too many digits
        raise InputError(f"{file}: not valid JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{file}: nested too deeply for a config") from None
    if not isinstance(data, dict):
        raise InputError(f"{file}: a config.json holds one JSON object, this holds a {type(data).__name__}")
    return data


def _read(path: str) -> tuple[str, str]:
    inside = f"{path.rstrip('/')}/config.json"
    try:
        return inside, _text(inside)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise InputError(f"{inside}: cannot be read ({error})") from None
    try:
        return path, _text(path)
    except IsADirectoryError:
        raise InputError(f"{path}: there is no config.json in this directory; name that of a model") from None
    except FileNotFoundError:
        what = path or "the name of the model is empty"
        raise InputError(f"{what}: no such file or directory; name a model directory or a config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _text(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123 - this layer does not import pathlib
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES} bytes, which no config.json is; name the config.json of a model")
    return raw.decode("utf-8")
