"""A recorded run again, exactly: every call is made, and everything that came of it must be as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from kvloom.errors import KVLoomError
from kvloom.manager import events
from kvloom.manager.decoding import Batch
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.stats import Stats
from kvloom.plan import CopyPlan
from kvloom.replay.codec import End
from kvloom.replay.player import Player
from kvloom.replay.recording import Recording


class Differs(Exception):  # noqa: N818 - not an error: it is what a comparison found
    """Something was not as recorded."""


class SamePlayer(Player):
    """Raises Differs at the first thing that is not as recorded."""

    def __init__(self, recording: Recording, manager: Manager) -> None:
        super().__init__(recording, manager)
        self._sequences: dict[int, CachedSequence] = {}
        self._batches: dict[int, Batch] = {}
        self._plans: dict[int, CopyPlan] = {}

    def compare(self, what: str, recorded: object, found: object) -> None:
        """See ``Player.compare``."""
        if recorded != found:
            raise Differs(f"line {self.line}: {what}: recorded {_word(recorded)}, now {_word(found)}")

    def compare_end(self, end: End, stats: Stats) -> None:
        """Raise Differs unless the counters are those of the recording, as far as both count the same."""
        self.line = self.recording.end_line
        kinds = {kind.name.lower(): asdict(counters) for kind, counters in sorted(stats.kinds.items())}
        self.compare("kinds", sorted(end.kinds), sorted(kinds))
        for kind, counters in end.kinds.items():
            for name, recorded in counters.items():
                self.compare(f"{kind} {name}", recorded, kinds[kind].get(name))
        for name in ("used", "nodes", "plans_open", "completions_ignored"):
            self.compare(name, getattr(end, name), getattr(stats, name))

    # ---------------------------------------------------------------- calls

    def _open(self, event: events.Open) -> None:
        if event.refused:
            self._refuses(event.refused, lambda: self.look(event))
            return
        sequence = self.look(event)
        found = sequence.explanation
        self.compare("tokens reused", event.reused, sequence.reused)
        self.compare("grade of the hit", event.grade, found.grade)
        self.compare("what ended the lookup", event.reason, found.limits[0].reason)
        self.compare("kind that ended the lookup", event.kind, found.limits[0].kind)
        self._take(event.plan, sequence.restore)
        self._sequences[event.seq] = sequence

    def _append(self, event: events.Append) -> None:
        sequence = self._find(event.seq)
        if event.refused:
            self._refuses(event.refused, lambda: sequence.append(event.tokens))
        else:
            self._take(event.plan, sequence.append(event.tokens))

    def _commit(self, event: events.Commit) -> None:
        self._take(event.plan, self._find(event.seq).commit(event.grade))

    def _rollback(self, event: events.Rollback) -> None:
        self._find(event.seq).rollback()

    def _checkpoint(self, event: events.Checkpoint) -> None:
        self._take(event.plan, self._find(event.seq).checkpoint())

    def _fork(self, event: events.Fork) -> None:
        sequence = self._find(event.seq)
        if event.refused:
            self._refuses(event.refused, sequence.fork)
            return
        self._sequences[event.child], plan = sequence.fork()
        self._take(event.plan, plan)

    def _close(self, event: events.Close) -> None:
        self._find(event.seq).close()
        del self._sequences[event.seq]

    def _batch(self, event: events.MakeBatch) -> None:
        self._batches[event.batch] = self.manager.batch([self._find(seq) for seq in event.seqs])

    def _step(self, event: events.Step) -> None:
        batch = self._find_batch(event.batch)
        if event.refused:
            self._refuses(event.refused, lambda: self.manager.step(batch, event.tokens))
        else:
            self._take_all(event.plans, self.manager.step(batch, event.tokens))

    def _finish(self, event: events.Finish) -> None:
        self._take_all(event.plans, self.manager.finish(self._find_batch(event.batch)))

    def _complete(self, event: events.Complete) -> None:
        self.manager.complete(self._plan(event.plan))

    def _abandon(self, event: events.Abandon) -> None:
        self.manager.abandon(self._plan(event.plan))

    # ---------------------------------------------------------------- parts

    def _refuses(self, name: str, call: Callable[[], object]) -> None:
        """``call`` must raise the error of this name."""
        try:
            call()
        except KVLoomError as error:
            self.compare("error", name, type(error).__name__)
            self.refused += 1
        else:
            self.compare("error", name, "none")

    def _find(self, seq: int) -> CachedSequence:
        sequence = self._sequences.get(seq)
        if sequence is None:
            self.fail(f"sequence {seq} is not open here")
        return sequence

    def _find_batch(self, number: int) -> Batch:
        batch = self._batches.get(number)
        if batch is None:
            self.fail(f"batch {number} was not made before")
        return batch

    def _take(self, ticket: int, plan: CopyPlan) -> None:
        self.compare("plan", ticket, plan.ticket)
        if plan.ticket:
            self._plans[plan.ticket] = plan

    def _take_all(self, tickets: tuple[int, ...], plans: tuple[CopyPlan, ...]) -> None:
        self.compare("plans", len(tickets), len(plans))
        for ticket, plan in zip(tickets, plans, strict=True):
            self._take(ticket, plan)

    def _plan(self, ticket: int) -> CopyPlan:
        """The plan; one that is not open any more is only a number."""
        return self._plans.pop(ticket, None) or CopyPlan(ticket)


def _word(value: object) -> str:
    name = getattr(value, "name", None)
    return name.lower() if isinstance(name, str) else str(value)
