"""Many arrays that travel as one pointer.

Numba hands a tuple of arrays over by value, 1.5 KB for those of the core, at every call of one compiled function by
another: that took longer than most of the functions.  A ``Handled`` object goes over as the address of a small table
that says where its arrays lie; ``a.slot[s, STATE]`` in compiled code reads it from there.  The arrays must not move or
change their shape as long as the object lives, so the compiler may read the table whenever it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args, get_type_hints
from weakref import WeakKeyDictionary

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, typeof_impl, unbox

from kvloom.types import AnyArray

ANY = 0
"""An extent that is known only when the arrays are made."""
_STRIDE = 4
"""Numbers per array in the table: its address and up to three extents."""
_WORD = ir.IntType(64)
_READ: WeakKeyDictionary[Any, dict[tuple[Any, str], Any]] = WeakKeyDictionary()
"""Per function that is being compiled: the arrays of its arguments that were read at its beginning."""
_ITEMS: dict[str, Any] = {"int32": types.int32, "int64": types.int64, "float64": types.float64}


@dataclass(frozen=True)
class Form:
    """What an array looks like: its dtype and extents, ``ANY`` or fixed.  Always contiguous."""

    dtype: str
    extents: tuple[int, ...]

    def fits(self, array: AnyArray) -> bool:
        """Whether ``array`` looks like this."""
        same = len(self.extents) == array.ndim and all(
            n in (ANY, m) for n, m in zip(self.extents, array.shape, strict=True)
        )
        return same and array.dtype == self.dtype and array.flags.c_contiguous


def int32(*extents: int) -> Form:
    """An int32 array."""
    return Form("int32", extents)


def int64(*extents: int) -> Form:
    """An int64 array."""
    return Form("int64", extents)


def float64(*extents: int) -> Form:
    """A float64 array."""
    return Form("float64", extents)


class Handled:
    """Base of a record of arrays; a subclass annotates every member with its ``Form``.

    Attributes:
        address: of the table, for compiled code; valid as long as this object lives.
    """

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        found = {name: get_args(hint)[-1] for name, hint in hints.items() if get_args(hint)}
        cls.forms = {name: form for name, form in found.items() if isinstance(form, Form)}
        cls._numba_type_ = HandledType(cls)  # asked for by Numba's fast path

    argument: ClassVar[str] = ""
    """What every parameter of this type is called in compiled functions."""
    forms: ClassVar[dict[str, Form]] = {}
    _numba_type_: ClassVar[Any] = None

    def __init__(self, **arrays: AnyArray) -> None:
        if arrays.keys() != self.forms.keys():
            raise TypeError(f"{type(self).__name__} is made of {', '.join(self.forms)}")
        self._table = np.zeros((len(arrays), _STRIDE), dtype=np.int64)
        for row, (name, form) in zip(self._table, self.forms.items(), strict=True):
            array = arrays[name]
            if not form.fits(array):
                raise TypeError(f"{name} is {array.dtype} {array.shape}, not {form}")
            row[0] = array.ctypes.data
            row[1 : 1 + array.ndim] = array.shape
            setattr(self, name, array)
        self.address: int = self._table.ctypes.data

    def items(self) -> Iterator[tuple[str, AnyArray]]:
        """Every array with its name."""
        return ((name, getattr(self, name)) for name in self.forms)


class HandledType(types.Type):
    """Numba's type of a subclass of ``Handled``: the address of its table."""

    def __init__(self, kind: type[Handled]) -> None:
        self.kind = kind
        super().__init__(name=f"Handled({kind.__module__}.{kind.__qualname__})")

    def array(self, name: str) -> Any:
        """Numba's type of one of its arrays."""
        form = self.kind.forms[name]
        return types.Array(_ITEMS[form.dtype], len(form.extents), "C")


@register_default(HandledType)
class _HandledModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD)


@typeof_impl.register(Handled)
def _typeof(value: Handled, _context: Any) -> Any:
    return type(value)._numba_type_


@unbox(HandledType)
def _unbox(_kind: Any, value: Any, context: Any) -> Any:
    address = context.pyapi.object_getattr_string(value, "address")
    number = context.unbox(types.int64, address)
    context.pyapi.decref(address)
    return NativeValue(number.value, is_error=number.is_error)


@infer_getattr
class _Members(AttributeTemplate):
    key = HandledType

    def generic_resolve(self, kind: Any, name: str) -> Any:
        return kind.array(name) if name in kind.kind.forms else None


@lower_getattr_generic(HandledType)
def _member(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    """The array ``name``.  Of an argument it is read once, at the beginning: thousands of reads compile for minutes."""
    function = builder.function
    argument = next((x for x in function.args if x.name == "arg." + kind.kind.argument), None)
    if argument is None:
        return _array(context, builder, kind, value, name)
    if "alwaysinline" not in function.attributes:
        function.attributes.add("noinline")  # now that calls are cheap, functions would grow into each other
    known = _READ.setdefault(function, {})
    if (kind, name) not in known:
        with builder.goto_entry_block():
            known[kind, name] = _array(context, builder, kind, argument, name)
    return known[kind, name]


def _array(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    """Numba's record of an array, put together without memory: this may be the end of a finished block."""
    forms = kind.kind.forms
    form, made = forms[name], kind.array(name)
    table = builder.inttoptr(value, _WORD.as_pointer())
    at = _STRIDE * list(forms).index(name)
    shape = [
        _word(extent) if extent != ANY else _constant_load(builder, table, at + 1 + i)
        for i, extent in enumerate(form.extents)
    ]
    items = shape[0]
    strides = [_word(made.dtype.bitwidth // 8)]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
        items = builder.mul(items, extent)
    pointer = builder.inttoptr(_constant_load(builder, table, at), context.get_data_type(made.dtype).as_pointer())
    null = ir.Constant(ir.IntType(8).as_pointer(), None)
    parts = {
        "meminfo": null,
        "parent": null,
        "nitems": items,
        "itemsize": strides[-1],
        "data": pointer,
        "shape": _packed(builder, shape),
        "strides": _packed(builder, strides),
    }
    model = context.data_model_manager[made]
    record = ir.Constant(model.get_value_type(), ir.Undefined)
    for part, number in parts.items():
        record = builder.insert_value(record, number, model.get_field_position(part))
    return record


def _word(number: int) -> Any:
    return ir.Constant(_WORD, number)


def _packed(builder: Any, numbers: list[Any]) -> Any:
    packed = ir.Constant(ir.ArrayType(_WORD, len(numbers)), ir.Undefined)
    for i, number in enumerate(numbers):
        packed = builder.insert_value(packed, number, i)
    return packed


def _constant_load(builder: Any, table: Any, at: int) -> Any:
    """Entry ``at`` of a table; marked as never changing, so that it is read once however much is written between."""
    number = builder.load(builder.gep(table, [_word(at)]))
    number.set_metadata("invariant.load", builder.module.add_metadata([]))
    return number


def both_addresses(first: Handled, second: Handled) -> AnyArray:
    """int64 [2]: the addresses of two objects, which calls from Python unpack fastest; the caller keeps them alive."""
    return np.array([first.address, second.address], dtype=np.int64)


def at_address(kind: type[Handled], place: int) -> Callable[[AnyArray], Any]:
    """An intrinsic that gives compiled code the object whose address is entry ``place`` of an int64 array."""
    made = kind._numba_type_

    def make(_typing: Any, addresses: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = context.make_array(signature.args[0])(context, builder, args[0]).data
            return _constant_load(builder, numbers, place)

        return made(addresses), generate

    return cast("Callable[[AnyArray], Any]", intrinsic(make))
