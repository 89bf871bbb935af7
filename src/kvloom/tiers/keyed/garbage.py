"""What is not wanted any more and still lies in the byte store, with the prices of what is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.tiers.keyed.records import record_bytes
from kvloom.tiers.keyed.sealed import HEADER, Sealed, unit_key
from kvloom.tiers.ledger import Accounts, End, Node
from kvloom.types import AnyArray, IntArray


class Garbage(Accounts):
    """Keys that are to be deleted, oldest first.  Callers hold the lock of the ledger.

    Args:
        recorded: whether units have records in the byte store.

    Attributes:
        bytes: of all of them.
    """

    def __init__(self, *, recorded: bool) -> None:
        self._recorded = recorded
        self._left: dict[str, int] = {}
        self.bytes = 0

    def object_bytes(self, lengths: IntArray) -> IntArray:
        """See ``Accounts``."""
        made: IntArray = lengths.astype("int64") + HEADER
        return made

    def unit_bytes(self, nodes: int, tokens: int, needs: int, objects: int) -> int:
        """See ``Accounts``; the same whether it is stored or kept in memory only."""
        return record_bytes(nodes, tokens, needs, objects)

    def objects_gone(self, chain: Sequence[Node], rows: AnyArray) -> None:
        """See ``Accounts``."""
        for row in rows:
            node = chain[row["depth"]]
            item = Sealed.of_row(node.layout, node.digest, row)
            self.add({item.key: item.size})

    def unit_gone(self, node: Node, end: End) -> None:
        """See ``Accounts``."""
        if self._recorded:
            self.add({unit_key(node.layout, node.digest, end.serial): end.record})

    def add(self, keys: Mapping[str, int]) -> None:
        """These are to be deleted, and have so many bytes at most."""
        for key, size in keys.items():
            self.bytes += size - self._left.get(key, 0)
            self._left[key] = size

    def first(self) -> str | None:
        """What is to be deleted next."""
        return next(iter(self._left), None)

    def deleted(self, key: str) -> None:
        """That is done."""
        self.bytes -= self._left.pop(key, 0)

    def later(self, key: str) -> None:
        """It could not be deleted now."""
        if key in self._left:
            self._left[key] = self._left.pop(key)

    def __len__(self) -> int:
        return len(self._left)
