"""One way to read a model config, whether it is a transformers object, a dict or a ``config.json``.

Nothing here imports transformers.  An object is read by attribute: transformers has already applied
its defaults.  A dict or a file holds only what differs from the defaults of its family
(``save_pretrained`` writes it that way), so the family table supplies the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvloom.errors import InputError, SpecError
from kvloom.spec.config_file import read_config_file

_MISSING = object()
_MOST = 2**31 - 1
_TEXT_CONFIG_NAMES = ("text_config", "decoder", "generator")


class ConfigView:
    """Reads values of one (text) config, then of its family's defaults.

    Args:
        source: a mapping, or any object with attributes.
        defaults: what transformers would fill in for keys that a mapping leaves out.
        aliases: name asked for -> other name under which a config may hold it.
    """

    def __init__(
        self, source: Any, defaults: Mapping[str, Any] | None = None, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self.defaults: Mapping[str, Any] = defaults or {}
        self.aliases: Mapping[str, str] = aliases or {}

    @property
    def is_object(self) -> bool:
        """True when transformers (or someone else) has already applied the defaults."""
        return not isinstance(self.source, Mapping)

    @property
    def model_type(self) -> str:
        """The family (``gpt_oss``); empty when the config does not say."""
        return str(self.given("model_type") or "")

    def with_family(self, defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> ConfigView:
        """The same config, completed by the defaults of its family."""
        return ConfigView(self.source, defaults, aliases)

    def given(self, name: str, default: Any = None) -> Any:
        """The value that the config itself holds under this name or its alias."""
        for key in (name, self.aliases.get(name)):
            if key is not None:
                value = self._read(key)
                if value is not _MISSING:
                    return value
        return default

    def has(self, name: str) -> bool:
        """True when the config itself (not only its family) has this value, even if it is None."""
        return self.given(name, _MISSING) is not _MISSING

    def get(self, name: str, default: Any = None) -> Any:
        """The value of the config, else of its family, else ``default``."""
        value = self.given(name, _MISSING)
        return self.defaults.get(name, default) if value is _MISSING else value

    def integer(self, name: str) -> int:
        """A value that must be a whole number from 1 to 2**31 - 1; SpecError names it otherwise."""
        value = self.get(name)
        label = self.model_type or "this model"
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"config of {label}: {name!r} must be a whole number >= 1, it is {value!r}")
        if value > _MOST:
            raise SpecError(f"config of {label}: {name!r} must be at most {_MOST}, it is {value}; correct the config")
        return value

    def layer(self, index: int) -> ConfigView:
        """The config of one layer (``per_layer_config`` overrides applied)."""
        per_layer = self.given("per_layer_config")
        if per_layer is None:
            return self
        if self.is_object:
            return ConfigView(per_layer[index], self.defaults, self.aliases)
        # transformers pads the keys of large models with zeros ("05").
        override = {int(key): value for key, value in per_layer.items()}.get(index)
        return self.with_values(override) if override else self

    def with_values(self, values: Mapping[str, Any]) -> ConfigView:
        """The same config with other values; only for mappings, an object knows its own."""
        return self if self.is_object else ConfigView({**self.source, **values}, self.defaults, self.aliases)

    def as_dict(self) -> dict[str, Any]:
        """Every value that the config holds, for the identity digest."""
        if isinstance(self.source, Mapping):
            return dict(self.source)
        to_dict = getattr(self.source, "to_dict", None)
        return dict(to_dict()) if callable(to_dict) else dict(vars(self.source))

    def _read(self, key: str) -> Any:
        if isinstance(self.source, Mapping):
            return self.source.get(key, _MISSING)
        try:
            return getattr(self.source, key, _MISSING)
        except RuntimeError:  # transformers: the value differs between layers, so there is no global one
            return _MISSING
        except ValueError as error:  # a derived value that the config class cannot derive
            raise SpecError(f"config of {type(self.source).__name__}: {key} cannot be derived ({error})") from None


ConfigLoader = Callable[[str], Any]
"""(path of a ``config.json`` or its directory) -> a config object with all defaults, as transformers makes it."""


def load_config(
    config: Any, *, lacks: Callable[[ConfigView], object] | None = None, complete: ConfigLoader | None = None
) -> ConfigView:
    """Read a config object, a dict, a ``config.json`` or a directory that holds one.

    Returns a view of its text part; of what ``complete`` makes of a path, if ``lacks`` finds that something is missing.

    Raises:
        InputError: no such file, not JSON, not a config.
        SpecError: an encoder-decoder or otherwise ambiguous model.
    """
    if isinstance(config, str) or hasattr(config, "__fspath__"):
        path = config if isinstance(config, str) else config.__fspath__()
        config = read_config_file(path)
        if complete is not None and lacks is not None and lacks(load_config(config)):
            config = complete(path)
    if config is None or isinstance(config, (bytes, int, float, Sequence)):
        raise InputError(f"a model config must be a config object, a dict or a path, not {type(config).__name__}")
    view = ConfigView(config)
    if view.given("is_encoder_decoder"):
        raise SpecError(f"{view.model_type or 'model'}: encoder-decoder models are not supported")
    return _text_part(view)


def _text_part(view: ConfigView) -> ConfigView:
    nested = [name for name in _TEXT_CONFIG_NAMES if view.given(name) is not None]
    if len(nested) > 1:
        raise SpecError(f"{view.model_type}: several text configs ({', '.join(nested)}); pass the one to serve")
    if not nested:
        return view
    part = view.given(nested[0])
    if isinstance(part, Mapping):
        outer = {key: view.given(key) for key in ("dtype", "torch_dtype", "quantization_config") if view.has(key)}
        outer_type = view.model_type
        part = {**outer, **part}
        # A composite config may leave the type of its text part to its class.
        part.setdefault("model_type", f"{outer_type}_text" if outer_type else "")
    return ConfigView(part)
