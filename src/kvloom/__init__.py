"""kvloom: a KV-cache manager for hybrid-attention LLMs.

Importing this package is cheap: names load on first use, and nothing here imports torch,
transformers or a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.config import CacheConfig, Device, parse_size
    from kvloom.errors import CapacityError, ConfigError, InputError, KVLoomError, SpecError
    from kvloom.plan import CopyPlan, Explanation, Limit
    from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
    from kvloom.types import Form, Grade, Kind, Reason

__version__ = "0.1.0"

_HOME = {
    "CacheConfig": "kvloom.config",
    "CapacityError": "kvloom.errors",
    "ConfigError": "kvloom.errors",
    "CopyPlan": "kvloom.plan",
    "Device": "kvloom.config",
    "Explanation": "kvloom.plan",
    "Form": "kvloom.types",
    "Grade": "kvloom.types",
    "GroupSpec": "kvloom.spec.model_spec",
    "InputError": "kvloom.errors",
    "KVLoomError": "kvloom.errors",
    "Kind": "kvloom.types",
    "Limit": "kvloom.plan",
    "ModelSpec": "kvloom.spec.model_spec",
    "Reason": "kvloom.types",
    "SpecError": "kvloom.errors",
    "TensorSpec": "kvloom.spec.model_spec",
    "parse_size": "kvloom.config",
}

__all__ = [
    "CacheConfig",
    "CapacityError",
    "ConfigError",
    "CopyPlan",
    "Device",
    "Explanation",
    "Form",
    "Grade",
    "GroupSpec",
    "InputError",
    "KVLoomError",
    "Kind",
    "Limit",
    "ModelSpec",
    "Reason",
    "SpecError",
    "TensorSpec",
    "__version__",
    "parse_size",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
