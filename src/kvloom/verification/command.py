"""The command ``kvloom verify-model``: arguments in, report out, exit code back."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvloom.config import format_size
from kvloom.engine.files import require_file
from kvloom.engine.memory import physical_memory
from kvloom.engine.stores import open_store
from kvloom.errors import CapacityError, InputError, MissingExtraError, SpecError, StoreError, UnsupportedError
from kvloom.verification.report import EXIT_INTERNAL, Report, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
MOST_SEED = 2**32 - 1
Write = Callable[[str], object]


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


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
    store: Path | None = None,
    store_size: int | None = None,
    as_json: bool = False,
    write: Write = print,
    tell: Write = _to_stderr,
) -> int:
    """Verify a model directory, or a ``config.json`` (or its directory) with random weights, and print the report.

    Args:
        source: directory with weights, or a ``config.json``, or a directory that holds one (with ``random_init``).
        random_init: use seeded random weights instead of the saved ones.
        tokens: length of the base prompt; by default enough for four segments and two windows.
        seed: draws the token ids, and the weights with ``random_init``; 0 to 2**32 - 1.
        segment: tokens per segment; by default the smallest multiple of the LCM that is >= ``block_size``.
        block_size: tokens per block.
        dtype: one of ``DTYPES``; by default the config's, else float32.
        device: torch device to run on.
        store: directory of a disk store, through which resumes are tried too.
        store_size: its cap in bytes; by default its own, or ``engine.stores.CAPACITY``.
        as_json: print one JSON object instead of text.
        write: receives the text to print.
        tell: receives notes, and one line about an error.

    Returns:
        0 exact, 1 differs, 2 unsupported or bad input (the reason says which), 70 internal error.
    """
    report = Report(model=source, dtype=dtype or "", tokens=tokens or 0, seed=seed)
    notes: list[str] = []
    try:
        if not 0 <= seed <= MOST_SEED:
            raise InputError(f"--seed: must be a whole number from 0 to {MOST_SEED}, not {seed}")
        if store is not None:
            open_store(store, store_size).close()  # before minutes of loading
        # Imported here: a missing extra must become exit code 2 and not a traceback.
        from kvloom.verification.verify import verify_model

        model = load_model(source, random_init=random_init, dtype=dtype, seed=seed, device=device)
        if random_init:
            notes += left_out(source)
        for note in notes:
            tell(f"note: {note}")
        report = verify_model(
            model,
            tokens=tokens,
            seed=seed,
            segment=segment,
            block_size=block_size,
            name=source,
            store=None if store is None else partial(open_store, store),
        )
    except (SpecError, UnsupportedError) as error:
        report.verdict, report.reason = Verdict.UNSUPPORTED, str(error)
    except (CapacityError, InputError, MissingExtraError, StoreError) as error:
        return refuse(report, type(error).__name__, str(error), as_json=as_json, write=write, tell=tell)
    except MemoryError as error:
        reason = f"this machine has not enough memory ({str(error) or 'out of memory'}); use fewer --tokens"
        return refuse(report, "MemoryError", reason, as_json=as_json, write=write, tell=tell)
    except ModuleNotFoundError as error:
        reason = f"verify-model needs {error.name}; run: pip install 'kvloom[transformers]'"
        return refuse(report, "MissingExtraError", reason, as_json=as_json, write=write, tell=tell)
    except Exception as error:  # the last line of defence of a command: report it, never a verdict
        traceback.print_exc(file=sys.stderr)
        reason = f"internal error: {type(error).__name__}: {error}"
        kind, code = type(error).__name__, EXIT_INTERNAL
        return refuse(report, kind, reason, as_json=as_json, write=write, tell=tell, code=code)
    if as_json:
        write(json.dumps({**report.to_json(), "notes": notes}, indent=2))
    else:
        write(report.to_text() if report.attention else f"{report.verdict.value}: {report.reason}")
    return report.exit_code


def refuse(
    report: Report, kind: str, reason: str, *, as_json: bool, write: Write, tell: Write, code: int | None = None
) -> int:
    """Say that nothing was verified: one line, and with ``as_json`` a report whose verdict is ``unsupported``.

    ``kind``: the type of the error.  Returns ``code``, by default that of the verdict.
    """
    report.verdict, report.reason = Verdict.UNSUPPORTED, " ".join(reason.split())
    code = report.exit_code if code is None else code
    tell(f"error: {report.reason}")
    if as_json:
        error = {"type": kind, "message": report.reason, "exit_code": code}
        write(json.dumps({**report.to_json(), "notes": [], "error": error}, indent=2))
    return code


def left_out(source: str) -> list[str]:
    """What random weights do not take over from the config of ``source``."""
    from kvloom.spec.config_view import load_config

    values = load_config(source).given("quantization_config")
    if not isinstance(values, dict):
        return []
    method = str(values.get("quant_method") or "unnamed")
    note = (
        f"quantization_config ({method}) of the config is left out: random weights are not quantized, so this says "
        "nothing about quantized weights or state"
    )
    return [note]


def load_model(
    source: str,
    *,
    random_init: bool = False,
    dtype: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    option: str = "--device",
) -> PreTrainedModel:
    """The model of a directory or config, in eval mode on ``device``; InputError when it cannot be loaded.

    ``option``: what ``device`` came from, for messages.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kvloom.adapters.auto_config import auto_config
    from kvloom.spec.config_view import load_config
    from kvloom.spec.from_config import activation_dtype, spec_from_config
    from kvloom.spec.presets import PRESETS
    from kvloom.testing.families import random_model

    path = Path(source)
    require_file(source)
    if not path.exists():
        if source.lower() in PRESETS:
            raise InputError(f"{source}: a preset has no weights to run; give a model directory or a config.json")
        raise InputError(f"{source}: no such file or directory; give a model directory or a config.json")
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype!r} is not known here; use one of {', '.join(DTYPES)}")
    name = activation_dtype(load_config(source), dtype)
    # Its errors name the layer; transformers' would come later and say less.
    spec_from_config(source, dtype=name, complete=auto_config)
    require_device(device, option)
    if random_init:
        config = text_config(path)
        _require_memory(source, config, name)
        try:
            return random_model(config, seed, name).to(device)
        except Exception as error:  # transformers raises whatever its parts raise
            raise InputError(f"{source}: transformers cannot make a model of it: {_first_line(error)}") from error
    if not path.is_dir():
        raise InputError(
            f"{source}: a config without weights; give a model directory (verify-model also takes --random-init)"
        )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, name), local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its parts raise
        raise InputError(f"{source}: transformers cannot load it: {_first_line(error)}") from error
    return model.eval().to(device)


def require_device(device: str, option: str = "--device") -> None:
    """InputError, which names the ``option``, unless torch can compute on ``device``."""
    import torch

    try:
        torch.ones(1, device=device).sum().item()  # the meta device has tensors, but no values
    except (RuntimeError, AssertionError) as error:
        reason = _first_line(error)
        raise InputError(
            f"{option} {device!r}: torch cannot compute there ({reason}); use cpu, or cuda where there is one"
        ) from error


def _require_memory(source: str, config: PreTrainedConfig, dtype: str) -> None:
    """InputError when random weights would be larger than the memory of the machine."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except Exception:  # what is wrong is said when the model is made
        return
    needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    there = physical_memory()
    if needed > there:
        raise InputError(
            f"{source}: random weights of this model take {format_size(needed)}, and this machine has "
            f"{format_size(there)} of memory; use a config with fewer or smaller layers"
        )


def text_config(path: Path) -> PreTrainedConfig:
    """Config object of the language model in a ``config.json``, or in a directory that holds one."""
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    try:
        json.loads(file.read_text(encoding="utf-8"))  # its message names line and column
        config = AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:  # transformers raises whatever its validators raise
        raise InputError(f"{file}: transformers cannot read the config: {_first_line(error)}") from error
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
