"""Configuration: the ``kv_cache_config`` YAML, environment variables, flags and tier values.

Precedence: defaults < YAML < environment (``KVLOOM_...``) < flags.  This module reads no files and no
environment: callers hand it the YAML text and the mapping (the command line passes ``os.environ``).
Every error is a ``ConfigError`` with one line that names the field and says how to mend it.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvloom.errors import ConfigError
from kvloom.types import Grade

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kib": 1024,
    "kb": 1000,
    "m": 1024**2,
    "mib": 1024**2,
    "mb": 1000**2,
    "g": 1024**3,
    "gib": 1024**3,
    "gb": 1000**3,
    "t": 1024**4,
    "tib": 1024**4,
    "tb": 1000**4,
}
MOST_BYTES = 1 << 50
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
ENV_PREFIX = "KVLOOM_"
YAML_ROOT = "kv_cache_config"


def parse_size(size: int | str) -> int:
    """Bytes meant by ``size``: an int, or a string such as ``"512MiB"``, ``"2GiB"``, ``"1.5GB"`` or ``"65536"``.

    ``K``, ``M``, ``G`` and ``T`` alone are binary (1024).  Raises ConfigError for anything else, and outside 1 byte to
    1024 TiB.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(
            f"size {_shown(size)} is not a number of bytes; write an integer or a string such as '512MiB'"
        )
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = match.group(2).lower() if match else None
        if match is None or unit not in _UNITS:
            raise ConfigError(
                f"size {_shown(size)} is not understood; write bytes or a unit, such as '512MiB' or '2GiB'"
            )
        number = min(float(match.group(1)), 2.0 * MOST_BYTES)  # float() of many digits is infinite
        size = int(number * _UNITS[unit])
    if size < 1:
        raise ConfigError(f"size {size} is below one byte; write a positive size such as '512MiB'")
    if size > MOST_BYTES:
        raise ConfigError("size is more than 1024 TiB; write what the machine has, such as '512MiB' or '2GiB'")
    return size


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def _shown(value: object) -> str:
    """``repr`` for a message: long or deeply nested values are cut short."""
    return _REPR.repr(value)


def format_size(n_bytes: float) -> str:
    """``n_bytes`` for people: ``"3.1 MiB"``; below 1 KiB exact bytes."""
    if abs(n_bytes) < 1024:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        n_bytes /= 1024
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} TiB"


def exact_size(n_bytes: int) -> str:
    """``n_bytes`` to be written again: ``"256KiB"`` where a unit divides it, else ``"1000B"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n_bytes and n_bytes % 1024**power == 0:
            return f"{n_bytes // 1024**power}{unit}"
    return f"{n_bytes}B"


def check_bytes(value: object, what: str) -> None:
    """Raise ConfigError, which begins with ``what``, unless ``value`` is an int that bytes of a machine can be."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what}: {_shown(value)} is not a number of bytes; write a whole number, such as {1 << 30}")
    if value > MOST_BYTES:
        raise ConfigError(f"{what}: {_shown(value)} bytes are more than 1024 TiB; write what the machine has")


def size_option(text: str, option: str) -> int:
    """Like ``parse_size``, for what a command's ``option`` was given: its errors name that."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option} {_shown(text)}: {error}") from None


def parse_grade(name: str) -> Grade:
    """The grade called ``name`` (any case).  Raises ConfigError that lists the grades."""
    try:
        return Grade[name.strip().upper()]
    except KeyError:
        grades = ", ".join(g.name.lower() for g in sorted(Grade, reverse=True))
        raise ConfigError(f"floor {_shown(name)} is not a grade; use one of: {grades}") from None


@dataclass(frozen=True, slots=True)
class Device:
    """The device tier: CUDA memory, or a bounded CPU arena standing in for it.

    Attributes:
        size: admission cap in bytes; given as an int or a string (``"2GiB"``).
    """

    size: int

    def __init__(self, size: int | str) -> None:
        object.__setattr__(self, "size", parse_size(size))


def _grade(value: object) -> object:
    return value if value is None or isinstance(value, Grade) else parse_grade(str(value))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Compression(_Section):
    """``compression:`` the cold form of objects that are rarely used."""

    enabled: bool = False
    method: Literal["lossless", "fp8"] = "lossless"
    threshold: Annotated[float, Field(ge=0)] = 10
    """An object whose decayed access counter falls below this goes to its cold form."""


class CacheConfig(_Section):
    """``kv_cache_config:``, with what flags and the environment add.

    Attributes:
        block_size: tokens per block of ratio-1 groups.
        gpu_watermark: share of the device tier above which background offload to the host tier starts.
        prefetch_window: blocks of every group that a prefetch reads at a time.
        compression: the cold form.
        device: cap of the device tier in bytes.
        host: cap of the host tier in bytes; None: there is none.
        floor: worst grade that a session accepts, unless it says otherwise.
    """

    block_size: Annotated[int, Field(ge=1, le=65536)] = 128
    gpu_watermark: Annotated[float, Field(gt=0, le=1)] = 0.8
    prefetch_window: Annotated[int, Field(ge=1)] = 3
    compression: Compression = Compression()
    device: Annotated[int, BeforeValidator(parse_size)] = 512 * 1024**2
    host: Annotated[int | None, BeforeValidator(lambda v: None if v is None else parse_size(v))] = None
    floor: Annotated[Grade | None, BeforeValidator(_grade)] = None

    @property
    def default_floor(self) -> Grade:
        """The floor of a session that names none: FAITHFUL, or APPROXIMATE once fp8 is switched on."""
        if self.floor is not None:
            return self.floor
        return Grade.APPROXIMATE if self.compression.enabled and self.compression.method == "fp8" else Grade.FAITHFUL

    @property
    def tiers(self) -> tuple[Device, ...]:
        """The tiers to hand to the manager."""
        return (Device(self.device),)

    def notices(self) -> list[str]:
        """What is said once about settings that were given: no effect, or a changed default."""
        given = self.model_fields_set
        said = []
        if "gpu_watermark" in given and self.host is None:
            said.append("gpu_watermark has no effect without a host tier to offload to; set host, such as host: 4GiB")
        if self.compression.enabled and self.compression.method == "fp8":
            if self.floor is None:
                said.append("compression.method fp8 lowers the default floor to 'approximate'")
            elif self.floor is not Grade.APPROXIMATE:
                said.append(
                    f"compression.method fp8 is approximate, and floor '{self.floor}' would never reuse it, so state "
                    "is kept in exact forms; for fp8 leave floor out, or write floor: approximate"
                )
        return said

    @classmethod
    def load(
        cls,
        text: str = "",
        *,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
        source: str = "configuration",
    ) -> CacheConfig:
        """Merge defaults < YAML ``text`` < ``environ`` < ``flags`` (None means: flag not given).

        ``text`` may be empty.  ``source`` names the file in messages.  Raises ConfigError.
        """
        merged = _read_yaml(text, source)
        origin: dict[tuple[str, ...], str] = {}
        for path, value in _from_environ(environ or {}):
            _put(merged, path, value)
            origin[path] = f"environment variable {ENV_PREFIX}{'_'.join(path).upper()}"
        for name, value in (flags or {}).items():
            if value is not None:
                path = tuple(name.split("."))
                _put(merged, path, value)
                origin[path] = f"--{name.replace('_', '-')} {_shown(value)}"
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            where = tuple(str(part) for part in error.errors(include_url=False)[0]["loc"])
            said, place = _explain(error), origin.get(where, source)
            if place.startswith("--"):  # it names field and value already
                said = said.partition(": ")[2]
            raise ConfigError(f"{place}: {said}") from None


def _read_yaml(text: str, source: str) -> dict[str, Any]:
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{source}: not valid YAML{where}: {problem}") from None
    if parsed is None:
        return {}
    if isinstance(parsed, dict) and len(parsed) > 1 and YAML_ROOT in parsed and parsed[YAML_ROOT] is None:
        parsed = {YAML_ROOT: _reindent(parsed)}
    if not isinstance(parsed, dict) or set(parsed) != {YAML_ROOT}:
        found = ", ".join(map(str, parsed)) if isinstance(parsed, dict) else type(parsed).__name__
        raise ConfigError(f"{source}: expected one top-level key '{YAML_ROOT}:', found: {found}")
    section = parsed[YAML_ROOT]
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: '{YAML_ROOT}:' must hold fields such as 'block_size: 128'")
    return _copy(section)


def _reindent(flat: dict[Any, Any]) -> dict[Any, Any]:
    """The fields of a ``kv_cache_config:`` whose indentation was lost on the way (copied from a web page)."""
    section = {k: v for k, v in flat.items() if k != YAML_ROOT}
    if "compression" in section and section["compression"] is None:
        inner = [k for k in Compression.model_fields if k in section]
        section["compression"] = {k: section.pop(k) for k in inner}
    return section


def _copy(section: dict[Any, Any]) -> dict[str, Any]:
    return {str(k): _copy(v) if isinstance(v, dict) else v for k, v in section.items()}


def _put(target: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        inner = target.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: expected fields, found {_shown(inner)}")
        target = inner
    target[path[-1]] = value


def _fields(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, (*prefix, name))
        else:
            yield (*prefix, name)


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    known = {ENV_PREFIX + "_".join(path).upper(): path for path in _fields(CacheConfig)}
    for name, value in environ.items():
        if name in known:
            yield known[name], value
        elif name.startswith(ENV_PREFIX):
            raise ConfigError(f"environment variable {name} is not known{_meant(name, known)}")


def _meant(name: str, known: Mapping[str, Any] | list[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _explain(error: ValidationError) -> str:
    """The first problem as one line: field, what is wrong, how to mend it."""
    first = error.errors(include_url=False)[0]
    path = tuple(str(p) for p in first["loc"])
    field = ".".join(path)
    if first["type"] == "extra_forbidden":
        siblings = [p[-1] for p in _fields(CacheConfig) if p[:-1] == path[:-1]]
        siblings += [p[0] for p in _fields(CacheConfig) if len(path) == 1 and len(p) > 1]
        return f"{field} is not a known field{_meant(path[-1], list(dict.fromkeys(siblings)))}"
    if first["type"] == "model_type":
        return f"{field} = {_shown(first['input'])}: expected fields, such as {{{', '.join(Compression.model_fields)}}}"
    message = str(first["msg"]).removeprefix("Value error, ")
    default = _default(path)
    hint = f" (default: {default})" if default is not None else ""
    return f"{field} = {_shown(first['input'])}: {message[:1].lower()}{message[1:]}{hint}"


def _default(path: tuple[str, ...]) -> Any:
    value: Any = CacheConfig()
    for name in path:
        value = getattr(value, name, None)
    if path == ("device",):
        value = exact_size(value)
    return value if not get_args(value) else None
