"""The reference manager: same questions, same answers as ``kvloom.Manager``, with nothing fast about it.

Token sequences are tuples, namespaces are pairs of salt and extra keys, the best boundary is found by trying
every boundary from the deepest up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.core.reference.arena import MISSES, Slot
from tests.core.reference.checkpoints import snapshot_plan
from tests.core.reference.core import Core
from tests.core.reference.index import Node, Place
from tests.core.reference.leasing import lease
from tests.core.reference.plans import Copy, Ticket
from tests.core.reference.sequence import RefSequence

from kvloom.core.geometry import smallest_arena
from kvloom.errors import CapacityError, SequenceError
from kvloom.eviction import EvictionPolicy
from kvloom.manager import Manager
from kvloom.plan import ArenaGeometry, Explanation, Limit
from kvloom.spec.footprint import peak_bytes, peak_slots
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import REASON_OF_COLUMN, SLOT_CLEARED, SLOT_QUARANTINED, Grade, Kind, ObjectState, Reason

Namespace = tuple[bytes, tuple[tuple[str, object], ...]]


class RefManager:
    """See the module docstring."""

    def __init__(
        self,
        spec: ModelSpec,
        cap: int,
        geometry: ArenaGeometry,
        max_sequences: int,
        places: int,
        policy: EvictionPolicy,
    ) -> None:
        self.spec = spec
        self.cap = cap
        self.geometry = geometry
        self.core = Core(spec, geometry, places, policy)
        self.arena = self.core.arena
        self.namespaces: dict[Namespace, Node] = {}
        self.max_sequences = max_sequences
        self.widths = [self._width(g) for g in range(len(spec.groups))]
        self.running: list[RefSequence] = []
        self.tickets: dict[int, Ticket] = {}
        self.last_ticket = 0
        self.ignored = 0

    @classmethod
    def beside(cls, manager: Manager, max_sequences: int) -> RefManager:
        """A reference of the same size as ``manager``, which is fresh."""
        places = len(manager.arrays.node)
        return cls(manager.spec, manager.cap, manager.geometry, max_sequences, places, manager.policy)

    def _width(self, g: int) -> int:
        """Places of a block table: what the arena can hold, or what the longest sequence of the model needs."""
        group, most = self.spec.groups[g], int(self.geometry.num_slots[g])
        if group.is_snapshot:
            return 1
        return min(most, -(-self.spec.max_positions // group.block_tokens)) if self.spec.max_positions else most

    # ---------------------------------------------------------------- requests

    def open(
        self,
        tokens: Sequence[int],
        salt: bytes,
        extra_keys: tuple[tuple[str, object], ...],
        floor: Grade,
        priority: int,
    ) -> RefSequence:
        """Match, explain, lease."""
        self.arena.clock += 1
        prompt = tuple(tokens)
        if not self.fits(len(prompt)):
            raise self.no_room(len(prompt))
        root = self._root((salt, extra_keys))
        node = self.best_boundary(root, prompt, floor)
        explanation = self.explain(root, prompt, node.end, floor)
        self.need_row()
        known = next(n for n in self.boundaries(root, prompt) if n.is_segment or n.parent is None)
        sequence = lease(self, node, prompt, floor, explanation, priority)
        sequence.parts = known.end // self.spec.segment_tokens if known.children and known.end > node.end else 0
        self.running.append(sequence)
        self._count_misses(len(prompt) - 1, node.end)
        return sequence

    def need_row(self) -> None:
        """CapacityError when as many sequences run as there are rows."""
        if len(self.running) == self.max_sequences:
            raise self.error(0, never=False)

    def _root(self, namespace: Namespace) -> Node:
        if namespace not in self.namespaces:
            root = self.core.index.new_root()
            if root is None and self.make_place():
                root = self.core.index.new_root()
            if root is None:
                raise self.error(0, never=False)
            self.core.touch(root)
            self.namespaces[namespace] = root
        return self.namespaces[namespace]

    def make_place(self) -> bool:
        """Room in a full index: forget empty namespaces, else evict."""
        gone = self.core.index.drop_empty_roots()
        self.namespaces = {name: root for name, root in self.namespaces.items() if root not in gone}
        return self.core.make_place()

    # ---------------------------------------------------------------- match and explanation

    def boundaries(self, root: Node, prompt: tuple[int, ...]) -> list[Node]:
        """Every node on the path of the tokens that leaves at least the last one to compute, deepest first."""
        limit = len(prompt) - 1
        found = [n for n in root.below() if n.end <= limit and prompt[: n.end] == tokens_to(n)]
        return sorted(found, key=lambda n: -n.end)

    def best_boundary(self, root: Node, prompt: tuple[int, ...], floor: Grade) -> Node:
        """The deepest boundary at which no group misses anything; the root is always one."""
        return next(n for n in self.boundaries(root, prompt) if not self.missing(n, floor))

    def objects_needed(self, node: Node) -> list[tuple[int, int, Node, Place]]:
        """What resuming at the end of ``node`` needs: (group, token at which it begins, node, place), in order."""
        segment = self.spec.segment_tokens
        needed = []
        for group in self.core.groups:
            if group.snapshot:
                if group.snapshot_needed(node.end):
                    needed.append((group.index, node.end, node, (group.index, 0)))
                continue
            for block in group.needed(node.end):
                owner = next(n for n in node.path if n.parent and n.start == block * group.tokens // segment * segment)
                place = (group.index, block - owner.start // group.tokens)
                needed.append((group.index, block * group.tokens, owner, place))
        return needed

    def missing(self, node: Node, floor: Grade) -> list[Limit]:
        """The first object of each group that cannot be used at the end of ``node``, and why."""
        limits: dict[int, Limit] = {}
        for g, position, owner, place in self.objects_needed(node):
            there = owner.columns[place]
            if isinstance(there, Slot) and there.grade >= floor:
                continue
            reason = Reason.GRADE if isinstance(there, Slot) else REASON_OF_COLUMN[there]
            group = self.core.groups[g]
            limits.setdefault(g, Limit(reason, position, kind=group.kind, group=group.name))
        return list(limits.values())

    def explain(self, root: Node, prompt: tuple[int, ...], reused: int, floor: Grade) -> Explanation:
        """What stopped the hit: faults at the deepest boundary that the tokens allow, then the tokens themselves."""
        limit = len(prompt) - 1
        if reused == limit:
            return Explanation(reused, None, len(prompt), reused, (Limit(Reason.LAST_TOKEN, limit),))
        known = max(common(prompt, tokens_to(n)) for n in root.below())
        deepest = self.boundaries(root, prompt)[0]
        limits = self.missing(deepest, floor) if deepest.end > reused else []
        if not root.children and not root.checkpoints:
            limits.append(Limit(Reason.EMPTY, 0))
        elif known < limit:
            limits.append(Limit(Reason.TOKENS, known))
        elif deepest.end <= reused:
            limits.append(Limit(Reason.NOT_KEPT, limit))
        return Explanation(reused, None, len(prompt), known, tuple(limits))

    def _count_misses(self, limit: int, reused: int) -> None:
        for group in self.core.groups:
            if group.snapshot:
                missed = int(reused < limit and group.snapshot_needed(limit))
            else:
                missed = len([b for b in group.needed(limit) if b >= group.begun(reused)])
            self.arena.counters[group.index][MISSES] += missed

    # ---------------------------------------------------------------- plans

    def issue(
        self,
        copies: list[Copy],
        ready: Sequence[Slot] = (),
        publish: Sequence[tuple[Node, Place, Slot]] = (),
        node: Node | None = None,
    ) -> Ticket | None:
        """A plan in flight; None when there is nothing to copy."""
        if not copies:
            if node is not None:
                self.core.release_node(node)
            return None
        for copy in copies:
            for slot in (copy.src, copy.dst):
                if slot is not None:
                    self.arena.hold(slot)
        self.last_ticket += 1
        ticket = Ticket(self.last_ticket, copies, list(ready), list(publish), node)
        self.tickets[ticket.number] = ticket
        return ticket

    def finish(self, number: int, *, executed: bool) -> None:
        """The plan was executed, or will never be."""
        self.arena.clock += 1
        if not executed and number in self.tickets:
            for sequence in self.running:
                sequence.broken = sequence.broken or sequence.restore == number
        self.end_ticket(number, executed=executed)

    def end_ticket(self, number: int, *, executed: bool) -> None:
        """Publish what the plan carries, or not, and let go of it."""
        if number == 0:
            return
        ticket = self.tickets.pop(number, None)
        if ticket is None:
            self.ignored += 1
            return
        if executed:
            for slot in ticket.ready:
                if slot.state is ObjectState.ALLOCATED:
                    slot.state = ObjectState.READY
            for node, place, slot in ticket.publish:
                slot.state = ObjectState.READY
                self.core.adopt(node, place, slot)
        for copy in ticket.copies:
            for end in (copy.src, copy.dst):
                if end is not None:
                    self.arena.release(end)
        for _, _, slot in ticket.publish:
            self.arena.release(slot)
        if ticket.node is not None:
            self.core.touch(ticket.node)
            self.core.rules.resumed(ticket.node)
            self.core.release_node(ticket.node)

    # ---------------------------------------------------------------- room

    def fits(self, tokens: int) -> bool:
        """Whether a request of this length fits into an empty arena."""
        slots = peak_slots(self.spec, tokens, self.spec.segment_tokens)
        have = [int(n) for n in self.geometry.num_slots]
        if self.arena.static:
            return all(n <= m for n, m in zip(slots, have, strict=True))
        pages = sum(-(-n // int(per)) for n, per in zip(slots, self.geometry.slots_per_page, strict=True))
        return pages <= len(self.arena.pages)

    def in_use(self) -> int:
        """Bytes that cannot be evicted now: held, or part of a path that somebody stands on."""
        return sum(self.core.groups[s.group].slot_bytes for s in self.core.held())

    def error(self, needed: int, *, never: bool) -> CapacityError:
        """What a request that gets no room raises."""
        return CapacityError("no room", needed=needed, cap=self.cap, in_use=self.in_use(), never_fits=never)

    def no_room(self, tokens: int) -> CapacityError:
        """The error of a request of ``tokens`` tokens that found everything in use."""
        if not self.fits(tokens):
            return self.error(smallest_arena(self.spec, tokens), never=True)
        return self.error(peak_bytes(self.spec, tokens, self.spec.segment_tokens), never=False)

    def used_bytes(self) -> int:
        """Bytes of every slot that is not free."""
        used = (s for slots in self.arena.slots for s in slots if s.state is not ObjectState.FREE)
        return sum(self.core.groups[s.group].slot_bytes for s in used)

    def evict(self, n_bytes: int) -> int:
        """Evict the oldest until enough is free that was not."""
        before = self.used_bytes()
        while before - self.used_bytes() < n_bytes and self.core.evict_oldest():
            pass
        return before - self.used_bytes()

    def clear(self, salt: bytes | None) -> int:
        """Forget every object of a salt, or of all."""
        self.arena.clock += 1
        roots = [root for (own, _), root in self.namespaces.items() if salt is None or own == salt]
        dropped = sum(self._forget(root, None, None, SLOT_CLEARED) for root in roots)
        self.collect()
        return dropped

    def drop(self, what: Kind | str, position: int | None, *, quarantine: bool) -> int:
        """Forget the objects of one kind or group, perhaps only those that begin at ``position``."""
        self.arena.clock += 1
        code = SLOT_QUARANTINED if quarantine else SLOT_CLEARED
        dropped = 0
        for group in self.core.groups:
            if what == (group.name if isinstance(what, str) else group.kind):
                dropped += self._forget(None, group.index, position, code)
        if quarantine:
            self._break_readers()
        self.collect()
        return dropped

    def reap(self) -> None:
        """Free what nobody can read any more."""
        self.core.reap(min((s.epoch for s in self.running), default=self.arena.clock + 1))

    def _break_readers(self) -> None:
        """Sequences that read, or are about to restore from, an object that failed a check."""
        for sequence in self.running:
            reads = [slot for held in sequence.blocks for slot in held.values()]
            if sequence.restore in self.tickets:
                reads += [c.src for c in self.tickets[sequence.restore].copies if c.src is not None]
            sequence.broken = sequence.broken or any(s.state is ObjectState.QUARANTINED for s in reads)

    def collect(self) -> bool:
        """Free what nobody reads, before a request is refused; whether anything went."""
        return self.core.collect([slot for s in self.running for held in s.blocks for slot in held.values()])

    def lacks_room(self, need: dict[int, int]) -> bool:
        """Whether some group cannot get the slots it needs, even when what nobody reads was freed."""
        full = self.core.lacks_room(need)
        return full is not None and (not self.collect() or self.core.lacks_room(need) is not None)

    # ---------------------------------------------------------------- decode steps

    def step(self, sequences: Sequence[RefSequence], tokens: Sequence[int]) -> list[Ticket | None]:
        """Commit the pending token of every sequence, then reserve one more for each; all or none of the latter."""
        plans = self.finish_step(sequences)
        if any(sequence.pending for sequence in sequences):
            self._end_all(plans)
            raise SequenceError("an append is pending")
        refused = self._reserve_all(sequences)
        if refused is not None and self.collect():
            refused = self._reserve_all(sequences)
        if refused is not None:
            self._end_all(plans)
            raise self.no_room(refused.length + 1)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.add([token], stepped=True)
        return plans

    def _reserve_all(self, sequences: Sequence[RefSequence]) -> RefSequence | None:
        refused = self._first_without_room(sequences)
        if refused is not None:
            return refused
        for at, sequence in enumerate(sequences):
            if not sequence.reserve(1):
                for before in sequences[:at]:
                    before.take_back()
                return sequence
        return None

    def _first_without_room(self, sequences: Sequence[RefSequence]) -> RefSequence | None:
        """The first sequence that cannot get another token beside those before it; None when all can at once."""
        narrow = [s for s in sequences if s.too_wide(1)]
        if narrow:
            return narrow[0]
        need: Counter[int] = Counter()
        for sequence in sequences:
            need += sequence.need(1)
        if self.core.lacks_room(need) is None:
            return None
        need = Counter()
        for sequence in sequences:
            need += sequence.need(1)
            if self.core.lacks_room(need) is not None:
                return sequence
        raise AssertionError("together they lack room")

    def _end_all(self, plans: Sequence[Ticket | None]) -> None:
        for plan in plans:
            self.end_ticket(0 if plan is None else plan.number, executed=False)

    def finish_step(self, sequences: Sequence[RefSequence]) -> list[Ticket | None]:
        """Commit the pending token of every sequence, then plan the snapshots of the segment ends."""
        for sequence in sequences:
            sequence.usable()
        self.arena.clock += 1
        ended = [s for s in sequences if s.stepped and s.compute(Grade.FAITHFUL)]
        if not any(group.snapshot for group in self.core.groups):
            return []
        return [snapshot_plan(s, asked=False) for s in ended]

    # ---------------------------------------------------------------- forgetting

    def _forget(self, root: Node | None, group: int | None, position: int | None, code: int) -> int:
        dropped = 0
        for node in sorted(self.core.index.all_nodes(), key=lambda n: n.number):
            if root is not None and node.path[0] is not root:
                continue
            for place in sorted(node.columns):
                slot = node.columns[place]
                if isinstance(slot, Slot) and group in (None, place[0]):
                    kind = self.core.groups[place[0]]
                    begin = node.end if kind.snapshot else node.start + place[1] * kind.tokens
                    if position in (None, begin):
                        self.core.forget(slot, code)
                        dropped += 1
        if dropped:
            self.core.worth.reconsider_all()
        return dropped


def tokens_to(node: Node) -> tuple[int, ...]:
    """All tokens from the root to the end of ``node``."""
    return tuple(t for n in node.path for t in n.tokens)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
