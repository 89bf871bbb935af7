"""Configs that only transformers can complete: families whose defaults kvloom does not know itself.

Importing this module is cheap; transformers is imported when a config is read.
"""

from __future__ import annotations

from typing import Any

from kvloom.errors import MissingExtraError, SpecError


def auto_config(path: str) -> Any:
    """The config object that transformers makes of a ``config.json``, or of a directory that holds one.

    Nothing is fetched and no code from the directory is run.

    Raises:
        MissingExtraError: transformers is not installed.
        SpecError: transformers does not understand it either.
    """
    unknown = f"{path}: the config leaves out what only transformers knows for its family"
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{unknown}, and {error.name} is not installed; run: pip install 'kvloom[transformers]'"
        ) from None
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises whatever its validators raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecError(f"{unknown}, and transformers cannot read it: {first}") from error
