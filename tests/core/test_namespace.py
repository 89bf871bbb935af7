"""Namespaces are injective, and the layout identity notices every part of a model that matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core import specs

from kvloom.core.namespace import encode_namespace
from kvloom.errors import InputError
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Kind
from kvloom.verify.abi import layout_identity

TEXT = st.text(st.characters(), max_size=6) | st.sampled_from(["", "S", "N\0", "\ud800", "é", "e\u0301"])
BYTES = st.binary(max_size=6) | st.sampled_from([b"", b"S", b"\0" * 8, b"L", b"N"])
VALUES = TEXT | BYTES | st.integers()
KEYS = st.lists(st.tuples(TEXT, VALUES), max_size=3)
NAMES = st.tuples(BYTES, KEYS, BYTES)


def typed(name: tuple[bytes, list[tuple[str, Any]], bytes]) -> Any:
    """Equality that tells 1 from "1" and from b"1"."""
    salt, keys, layout = name
    return salt, [(key, type(value).__name__, value) for key, value in keys], layout


@given(NAMES, NAMES)
def test_different_inputs_never_share_a_namespace(
    one: tuple[bytes, list[Any], bytes], other: tuple[bytes, list[Any], bytes]
) -> None:
    assert (encode_namespace(*one) == encode_namespace(*other)) == (typed(one) == typed(other))


@given(NAMES, st.integers(0, 30), st.integers(0, 30))
def test_moving_bytes_between_fields_changes_the_key(
    name: tuple[bytes, list[Any], bytes], at: int, length: int
) -> None:
    """The classic collision: the same bytes, cut elsewhere."""
    salt, keys, layout = name
    joined = salt + layout
    cut, other = at % (len(joined) + 1), length % (len(joined) + 1)
    one = encode_namespace(joined[:cut], keys, joined[cut:])
    two = encode_namespace(joined[:other], keys, joined[other:])
    assert (one == two) == (cut == other)


@pytest.mark.parametrize(
    ("salt", "keys"),
    [
        ("text", ()),
        (None, ()),
        (bytearray(b"x"), ()),
        (b"", ["lora"]),
        (b"", [("lora",)]),
        (b"", [("lora", "a", "b")]),
        (b"", [(1, "a")]),
        (b"", [("lora", None)]),
        (b"", [("lora", 1.5)]),
        (b"", [("lora", True)]),
        (b"", "ab"),
    ],
)
def test_what_cannot_be_encoded_is_refused(salt: object, keys: Any) -> None:
    with pytest.raises(InputError):
        encode_namespace(salt, keys, b"")


def _changed_group(spec: ModelSpec, **changes: Any) -> ModelSpec:
    groups: tuple[GroupSpec, ...] = (replace(spec.groups[0], **changes), *spec.groups[1:])
    return replace(spec, groups=groups)


def _changed_tensor(spec: ModelSpec, **changes: Any) -> ModelSpec:
    tensor = replace(spec.groups[0].tensors[0], **changes)
    return _changed_group(spec, tensors=(tensor,))


OTHERS = {
    "format": lambda s: replace(s, format="fp8"),
    "block size": lambda s: replace(s, block_size=8),
    "segment": lambda s: s.with_segment(32),
    "snapshot interval": lambda s: replace(s, snapshot_interval=32),
    "weights": lambda s: replace(s, identity=(("weights", "sha:1"),)),
    "weights, cut elsewhere": lambda s: replace(s, identity=(("weightss", "ha:1"),)),
    "threads": lambda s: replace(s, identity=(("threads", "2"),)),
    "order of the groups": lambda s: replace(s, groups=s.groups[::-1]),
    "group name": lambda s: _changed_group(s, name="other"),
    "kind": lambda s: _changed_group(s, kind=Kind.INDEXER),
    "layers": lambda s: _changed_group(s, layers=(1,)),
    "more layers": lambda s: _changed_group(s, layers=(0, 1)),
    "ratio": lambda s: _changed_group(s, ratio=2),
    "block": lambda s: _changed_group(s, block_tokens=16),
    "window": lambda s: _changed_group(s, window=4),
    "chunked": lambda s: _changed_group(s, chunked=True),
    "needed unless": lambda s: _changed_group(s, needed_unless_multiple_of=4),
    "first needed": lambda s: _changed_group(s, first_needed=2),
    "tensor name": lambda s: _changed_tensor(s, name="values"),
    "heads": lambda s: _changed_tensor(s, shape=(2, 128)),
    "dtype": lambda s: _changed_tensor(s, dtype="bfloat16"),
    "entry axis": lambda s: _changed_tensor(s, entry_axis=0),
    "memory order": lambda s: _changed_tensor(s, order=(1, 0)),
}


def test_the_layout_identity_notices_every_change() -> None:
    identities = {name: layout_identity(change(specs.V4)) for name, change in OTHERS.items()}
    identities["as it is"] = layout_identity(specs.V4)
    assert len(set(identities.values())) == len(identities)
    assert layout_identity(replace(specs.V4, name="only a name")) == layout_identity(specs.V4)
