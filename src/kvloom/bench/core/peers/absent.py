"""Modules that are not installed stand empty, so that what only imports them on its way can be imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from types import FrameType
from typing import Any


class Empty:
    """Stands for anything in a module that is absent: callable, subscriptable, usable as a decorator or a base."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and not named and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty()

    def __getitem__(self, _: Any) -> Any:
        return Empty()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __get_pydantic_core_schema__(self, *_: Any) -> Any:
        return importlib.import_module("pydantic_core.core_schema").any_schema()


class EmptyModule(types.ModuleType):
    """A module in which every name is there, and empty."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty()


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no other finder found for SGLang; never a part of SGLang itself, torch or what they all use."""

    real = ("sglang", "torch", "transformers", "numpy", "triton", "tvm_ffi", "pydantic", "pydantic_core")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.split(".", maxsplit=1)[0]
        if root in self.real or root in sys.stdlib_module_names or not self._asked_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    @staticmethod
    def _asked_by_sglang() -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("importlib", "_frozen_importlib")) and name != __name__:
                return name.split(".")[0] in ("sglang", "huggingface_hub")
            frame = frame.f_back
        return False

    def create_module(self, spec: Any) -> Any:
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass
