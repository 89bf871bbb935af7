"""The command ``kvloom verify-model``: arguments in, report out, exit code back."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvloom.errors import CapacityError, InputError, MissingExtraError, SpecError, UnsupportedError
from kvloom.verification.report import EXIT_INTERNAL, Report, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
_NOT_OUR_FAULT = (CapacityError, InputError, MissingExtraError, SpecError, UnsupportedError)
"""What input can cause; any other exception, also another of kvloom's own, is an internal error."""


def verify_command(
    source: str,
    *,
    random_init: bool = False,
    tokens: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
    segment: int | None = None,
    block_size: int = 128,
    device: str = "cpu",
    as_json: bool = False,
    write: Callable[[str], object] = print,
) -> int:
    """Verify a model directory, or a ``config.json`` (or its directory) with random weights, and print the report.

    Args:
        source: directory with weights, or a ``config.json``, or a directory that holds one (with ``random_init``).
        random_init: use seeded random weights instead of the saved ones.
        tokens: length of the base prompt; by default enough for four segments and two windows.
        seed: draws the token ids, and the weights with ``random_init``.
        segment: tokens per segment; by default the smallest multiple of the LCM that is >= ``block_size``.
        block_size: tokens per block.
        dtype: one of ``DTYPES``; by default the config's, else float32.
        device: torch device to run on.
        as_json: print one JSON object instead of text.
        write: receives the text to print.

    Returns:
        0 exact, 1 differs, 2 unsupported or bad input (the reason says which), 70 internal error.
    """
    report = Report(model=source, dtype=dtype or "", tokens=tokens or 0, seed=seed)
    code = None
    try:
        # Imported here: a missing extra must become exit code 2 and not a traceback.
        from kvloom.verification.verify import verify_model

        model = load_model(source, random_init=random_init, dtype=dtype, seed=seed, device=device)
        report = verify_model(model, tokens=tokens, seed=seed, segment=segment, block_size=block_size, name=source)
    except _NOT_OUR_FAULT as error:
        report.verdict, report.reason = Verdict.UNSUPPORTED, str(error)
    except ModuleNotFoundError as error:
        report.verdict = Verdict.UNSUPPORTED
        report.reason = f"verify-model needs {error.name}; run: pip install 'kvloom[transformers]'"
    except Exception as error:  # the last line of defence of a command: report it, never a verdict
        traceback.print_exc(file=sys.stderr)
        code = EXIT_INTERNAL
        report.verdict, report.reason = Verdict.UNSUPPORTED, f"internal error: {type(error).__name__}: {error}"
    write(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    return report.exit_code if code is None else code


def load_model(
    source: str, *, random_init: bool = False, dtype: str | None = None, seed: int = 0, device: str = "cpu"
) -> PreTrainedModel:
    """The model of a directory or config, in eval mode on ``device``; InputError when it cannot be loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvloom.spec.config_view import load_config
    from kvloom.spec.from_config import activation_dtype, spec_from_config
    from kvloom.testing.families import random_model

    path = Path(source)
    if not path.exists():
        raise InputError(f"{source}: no such file or directory; give a model directory or a config.json")
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    name = activation_dtype(load_config(source), dtype)
    spec_from_config(source, dtype=name)  # its errors name the layer; transformers' would come later and say less
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used: {_first_line(error)}") from error
    if random_init:
        return random_model(text_config(path), seed, name).to(device)
    if not path.is_dir():
        raise InputError(f"{source}: a config without weights; give a model directory, or --random-init")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, name), local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its parts raise
        raise InputError(f"{source}: transformers cannot load it: {_first_line(error)}") from error
    return model.eval().to(device)


def text_config(path: Path) -> object:
    """Config object of the language model in a ``config.json``, or in a directory that holds one."""
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    try:
        json.loads(file.read_text(encoding="utf-8"))  # its message names line and column
        config = AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:  # transformers raises whatever its validators raise
        raise InputError(f"{file}: transformers cannot read the config: {_first_line(error)}") from error
    return config.get_text_config(decoder=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
