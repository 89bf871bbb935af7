"""The prefix index: a plain tree of nodes that are compared by their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tests.core.reference.arena import Slot

if TYPE_CHECKING:
    from tests.core.reference.policies import Rules

Place = tuple[int, int]
"""(group, block of the group within the segment); snapshots have block 0."""


class Node:
    """A root, a segment or a checkpoint.  ``columns`` holds slots, or the code that says why there is none."""

    def __init__(self, number: int, parent: Node | None, tokens: tuple[int, ...], segment: int, places: list[Place]):
        self.number = number
        self.parent = parent
        self.tokens = tokens
        self.is_segment = len(tokens) == segment
        self.columns: dict[Place, Slot | int] = dict.fromkeys(places, -1)
        self.children: list[Node] = []
        self.checkpoints: list[Node] = []
        self.holders = 0
        self.anchors = 0
        self.stamp = 0
        # what eviction policies know: see ``tests.core.reference.policies``
        self.uses = self.folded = self.priority = self.spent = self.since = self.tick = 0
        self.is_end = self.main = self.queued = self.stranded = False
        self.trial: int | None = None

    @property
    def depth(self) -> int:
        """Segments up to the end of this node; those of its parent for a checkpoint."""
        return sum(n.is_segment for n in self.path if n.parent)

    @property
    def start(self) -> int:
        """Tokens before this node."""
        return 0 if self.parent is None else self.parent.end

    @property
    def end(self) -> int:
        """Tokens up to the end of this node."""
        return self.start + len(self.tokens)

    @property
    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        return [self] if self.parent is None else [*self.parent.path, self]

    @property
    def objects(self) -> list[Slot]:
        """The cached objects that this node names."""
        return [slot for slot in self.columns.values() if isinstance(slot, Slot)]

    @property
    def evictable(self) -> bool:
        """A leaf that has objects."""
        return self.anchors == 0 and bool(self.objects)

    def below(self) -> Iterator[Node]:
        """Everything below, then the node: children first, then its checkpoints."""
        for child in self.children:
            yield from child.below()
        for checkpoint in self.checkpoints:
            yield from checkpoint.below()
        yield self

    def child(self, tokens: Sequence[int]) -> Node | None:
        """The child or checkpoint with exactly these tokens."""
        wanted = tuple(tokens)
        return next((n for n in self.children + self.checkpoints if n.tokens == wanted), None)


class Index:
    """All namespaces.

    ``holders`` of a node are the sequences that end there and the transfers to it; its ``anchors`` are these and
    whatever lives below.  A node lives by its objects and anchors.  Dead nodes stay as ghosts, which explain misses,
    until their place is needed.
    """

    def __init__(self, places: int, segment: int, columns: list[Place]) -> None:
        self.segment = segment
        self._columns = columns
        self.roots: list[Node] = []
        self.ghosts: list[Node] = []
        self.free = list(reversed(range(places)))
        self.rules: Rules | None = None
        self._at_once = max(1, min(64, places // 16))

    def settle(self) -> None:
        """Recompute who is anchored and who is a ghost.

        The newly dead join the end of the line, children before parents, and leave the time of their last use to the
        parent.
        """
        dead: list[Node] = []
        living: set[Node] = set()
        for node in self.all_nodes():  # children come before their parents
            node.anchors = node.holders + sum(n in living for n in node.children + node.checkpoints)
            if node.anchors or node.objects:
                living.add(node)
            elif node.parent and node not in self.ghosts:
                dead.append(node)
                self._rules.buried(node)
                node.parent.stamp = max(node.parent.stamp, node.stamp)
        for node in self.ghosts:
            if node in living:
                self._rules.revived(node)
        self.ghosts = [n for n in self.ghosts if n not in living] + dead
        for node in self.all_nodes():
            if node.evictable and not node.queued:
                self._rules.joined(node)
            node.queued = node.evictable

    @property
    def _rules(self) -> Rules:
        assert self.rules is not None
        return self.rules

    def leaves(self) -> list[Node]:
        """What may be evicted whole, least recently used first."""
        return sorted((n for n in self.all_nodes() if n.evictable), key=lambda n: (n.stamp, n.number))

    def place(self) -> int | None:
        """A free place; the oldest ghosts make room when there is none."""
        count = 0 if self.free else min(self._at_once, len(self.ghosts))
        for _ in range(count):
            ghost = self.ghosts.pop(0)
            assert ghost.parent is not None
            assert not ghost.children + ghost.checkpoints, "a ghost goes before its parent"
            siblings = ghost.parent.children if ghost.is_segment else ghost.parent.checkpoints
            siblings.remove(ghost)
            self._rules.forgotten(ghost)
            self.free.append(ghost.number)
        return self.free.pop() if self.free else None

    def new_root(self) -> Node | None:
        """The root of another namespace."""
        number = self.place()
        if number is None:
            return None
        self.roots.append(Node(number, None, (), self.segment, self._columns))
        self._rules.born(self.roots[-1])
        return self.roots[-1]

    def drop_empty_roots(self) -> list[Node]:
        """Forget the namespaces that nothing hangs on."""
        gone = [r for r in self.roots if r.anchors == 0 and not r.children and not r.checkpoints]
        for root in gone:
            self.roots.remove(root)
            self.free.append(root.number)
        return gone

    def new_node(self, parent: Node, tokens: Sequence[int]) -> Node | None:
        """A child of ``parent`` with one holder, the caller; ``parent`` must be held."""
        number = self.place()
        if number is None:
            return None
        node = Node(number, parent, tuple(tokens), self.segment, self._columns)
        node.holders = 1
        self._rules.born(node)
        (parent.children if node.is_segment else parent.checkpoints).insert(0, node)
        return node

    def all_nodes(self) -> list[Node]:
        """Every node there is."""
        return [n for root in self.roots for n in root.below()]
