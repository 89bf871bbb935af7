"""Who shares with whom: salt, extra keys and layout make one name, and every name is the root of a tree of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.core import sweep
from kvloom.core.arrays import Arrays
from kvloom.core.digests import PrefixKeys
from kvloom.core.eviction import make_node_room
from kvloom.core.fields import ANCHORS, FIRST_CHECKPOINT, FIRST_CHILD
from kvloom.core.namespace import ExtraKey, encode_namespace
from kvloom.core.prefix_index import take_node
from kvloom.manager.inputs import checked_keys

_REMEMBERED = 4096


@dataclass(slots=True)
class Namespace:
    """One root of the index: a salt, its extra keys and the layout they were stored under."""

    root: int
    salt: bytes
    layout: bytes


class Namespaces:
    """The namespaces of one manager.

    Attributes:
        layout: the layout identity that is part of every name.
        by_name: those that the index has a root for.
    """

    def __init__(self, arrays: Arrays, layout: bytes) -> None:
        self._arrays = arrays
        self._plain: dict[bytes, bytes] = {}
        self._keys: dict[bytes, PrefixKeys] = {}
        self.layout = layout
        self.by_name: dict[bytes, Namespace] = {}

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self.by_name.values())

    def name(self, salt: bytes, extra_keys: Sequence[ExtraKey]) -> bytes:
        """The encoded namespace; those without extra keys are remembered.  InputError for odd salts and keys."""
        if extra_keys != () or type(salt) is not bytes:
            return encode_namespace(salt, checked_keys(extra_keys), self.layout)
        name = self._plain.get(salt)
        if name is None:
            name = encode_namespace(salt, (), self.layout)
            if len(self._plain) < _REMEMBERED:
                self._plain[salt] = name
        return name

    def find(self, salt: bytes, extra_keys: Sequence[ExtraKey]) -> Namespace | None:
        """The namespace, when the index has it; InputError like ``name``."""
        return self.by_name.get(self.name(salt, extra_keys))

    def make(self, name: bytes, salt: bytes) -> Namespace | None:
        """A new root under ``name``; None when the index is full of what is in use."""
        root = int(take_node(self._arrays))
        if root < 0 and self.make_node_room():
            root = int(take_node(self._arrays))
        if root < 0:
            return None
        namespace = self.by_name[name] = Namespace(root, salt, self.layout)
        return namespace

    def make_node_room(self) -> bool:
        """Free a place in a full index: forget empty namespaces, else evict.  False when every node is in use."""
        a = self._arrays
        roots = np.array(self.roots(), dtype=np.int64)
        loose = (a.node[roots, ANCHORS] == 0) & (a.node[roots, FIRST_CHECKPOINT] < 0)
        empty = loose & (a.trunk[roots, FIRST_CHILD] < 0)
        for name in [n for n, gone in zip(self.by_name, empty.tolist(), strict=True) if gone]:
            sweep.free_empty_root(a, self.by_name.pop(name).root)
        return bool(make_node_room(a))

    def roots(self) -> list[int]:
        """The root nodes of all."""
        return [namespace.root for namespace in self]

    def prefix_keys(self, name: bytes) -> PrefixKeys:
        """What digests of prefixes under ``name`` are keyed with (remembered, for a number of names)."""
        keys = self._keys.get(name)
        if keys is None:
            keys = PrefixKeys.of(name)
            if len(self._keys) < _REMEMBERED:
                self._keys[name] = keys
        return keys
