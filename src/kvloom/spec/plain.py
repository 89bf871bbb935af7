"""A model spec as plain values that JSON can hold, and back.

Unlike a config or a preset these say everything: the groups as they were measured on a loaded model, where they are
cut, and what is part of the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from kvloom.errors import SpecError
from kvloom.spec.from_config import finish_spec
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.types import Kind

_MOST = 1 << 40


def spec_to_plain(spec: ModelSpec) -> dict[str, Any]:
    """``spec`` as dicts, lists, strings and numbers; kinds as words."""
    plain = asdict(spec)
    for group in plain["groups"]:
        group["kind"] = Kind(group["kind"]).name.lower()
    return plain


def spec_from_plain(plain: object) -> ModelSpec:
    """The spec that ``spec_to_plain`` made ``plain`` of.

    Raises SpecError (or ConfigError, for the segment) that names the first thing that is wrong; nothing is guessed.
    """
    values = _fields(plain, ModelSpec, "model", _MODEL)
    groups = [_group(values["name"], i, group) for i, group in enumerate(values["groups"])]
    replay_tokens = values.pop("exact_replay_tokens")
    spec = finish_spec(
        values["name"],
        groups,
        block_size=values["block_size"],
        segment=values["segment_tokens"],
        snapshot_interval=values["snapshot_interval"],
        max_positions=values["max_positions"],
        vocab_size=values["vocab_size"],
        identity=values["identity"],
        form=values["format"],
    )
    return replace(spec, exact_replay_tokens=replay_tokens)


def _group(model: str, index: int, plain: object) -> GroupSpec:
    where = f"model.groups[{index}]"
    values = _fields(plain, GroupSpec, where, _GROUP)
    tensors = [
        TensorSpec(**_fields(tensor, TensorSpec, f"{where}.tensors[{i}]", _TENSOR))
        for i, tensor in enumerate(values["tensors"])
    ]
    group = GroupSpec(**{**values, "tensors": tuple(tensors)})
    if not group.tensors or not group.layers:
        raise SpecError(f"{where}: a group has at least one tensor and one layer")
    if group.block_tokens % group.ratio:
        raise SpecError(f"{where}: block_tokens {group.block_tokens} is not a multiple of the ratio {group.ratio}")
    for tensor in group.tensors:
        axis = tensor.entry_axis
        if (axis is None) != group.is_snapshot or (axis is not None and axis > len(tensor.shape)):
            raise SpecError(f"{where}: entry_axis {axis} of tensor {tensor.name!r} does not go with its shape")
    return group


# ---------------------------------------------------------------- single values


def _fields(plain: object, cls: type, where: str, read: Mapping[str, Callable[[object], Any]]) -> dict[str, Any]:
    """The fields of ``cls`` out of ``plain``, each read by its own function (which raises ValueError)."""
    if not isinstance(plain, dict):
        raise SpecError(f"{where} is a {type(plain).__name__}; it must be an object with {', '.join(read)}")
    assert {field.name for field in fields(cls)} == set(read)
    for name in plain:
        if name not in read:
            raise SpecError(f"{where}: unknown field {_shown(name)}; known: {', '.join(read)}")
    values = {}
    for name, convert in read.items():
        if name not in plain:
            raise SpecError(f"{where}: the field {name!r} is missing")
        try:
            values[name] = convert(plain[name])
        except ValueError as error:
            raise SpecError(f"{where}.{name} is {_shown(plain[name])}; it must be {error}") from None
    return values


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _number(least: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ValueError(f"a whole number from {least} to {_MOST}")
        return value

    return read


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(_number(0)(number) for number in _list(value))


def _maybe(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


def _kind(value: object) -> Kind:
    for kind in Kind:
        if value == kind.name.lower():
            return kind
    raise ValueError(f"one of {', '.join(kind.name.lower() for kind in Kind)}")


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    pairs = _list(value)
    if not all(isinstance(p, list) and len(p) == 2 and all(isinstance(v, str) for v in p) for p in pairs):
        raise ValueError("a list of [name, value] pairs of strings")
    return tuple((name, held) for name, held in pairs)


_MODEL: Mapping[str, Callable[[object], Any]] = {
    "name": _text,
    "groups": _list,
    "block_size": _number(1),
    "segment_tokens": _number(1),
    "format": _text,
    "max_positions": _number(0),
    "vocab_size": _number(0),
    "snapshot_interval": _number(0),
    "exact_replay_tokens": _number(0),
    "identity": _pairs,
}
_GROUP: Mapping[str, Callable[[object], Any]] = {
    "name": _text,
    "kind": _kind,
    "layers": _numbers,
    "tensors": _list,
    "ratio": _number(1),
    "block_tokens": _number(0),
    "window": _number(0),
    "chunked": _flag,
    "needed_unless_multiple_of": _number(0),
    "first_needed": _number(0),
}
_TENSOR: Mapping[str, Callable[[object], Any]] = {
    "name": _text,
    "shape": _numbers,
    "dtype": _text,
    "entry_axis": _maybe(_number(0)),
    "order": _maybe(_numbers),
}
