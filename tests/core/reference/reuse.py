"""What the policy ``cost`` learns, in plain Python: trials by class and age, and the index made from them."""

from __future__ import annotations

from tests.core.reference.index import Node

BINS, SLOTS, CLASSES = 72, 256, 8
ONE = 1 << 40


def class_of(node: Node) -> int:
    """Use-count bucket, and whether the latest request ended there."""
    bucket = sum(node.uses >= least for least in (2, 3, 5))
    return 2 * bucket + int(node.is_end)


def edge(b: int) -> int:
    """First age of a bin: 0, 1, 2, 3, then four bins to each octave."""
    return b if b < 4 else (4 + b % 4) * 2 ** (b // 4 - 1)


EDGES = [edge(b) for b in range(BINS + 1)]


def bin_of(age: int) -> int:
    """The bin of an age."""
    return max(b for b in range(BINS) if EDGES[b] <= age)


class Reuse:
    """Ended trials by age, open ones by when they began, and the index."""

    def __init__(self) -> None:
        self.now = 0
        self.ended_reused = [[0] * BINS for _ in range(CLASSES)]
        self.ended_expired = [[0] * BINS for _ in range(CLASSES)]
        self.open = [[0] * SLOTS for _ in range(CLASSES)]
        self.shift = self.base = 0
        self.squares = self.total = 0
        self.planned = [[0] * (BINS + 1) for _ in range(CLASSES)]

    def _slot(self, tick: int) -> int:
        return max(0, tick // 2**self.shift - self.base)

    def begin(self, node: Node, trial: int, tick: int | None = None) -> None:
        """A trial of the node begins."""
        node.trial = trial
        node.tick = self.now if tick is None else tick
        self.open[trial][self._slot(node.tick)] += 1

    def undo(self, node: Node) -> None:
        """The trial is taken out of the open ones."""
        if node.trial is not None:
            self.open[node.trial][self._slot(node.tick)] -= 1
            node.trial = None

    def reused(self, node: Node) -> None:
        """The trial ended well."""
        if node.trial is not None:
            self.ended_reused[node.trial][bin_of(self.now - node.tick)] += 1
            self.undo(node)

    def expired(self, node: Node) -> None:
        """The index forgot the node."""
        if node.trial is None:
            return
        age = self.now - node.tick
        self.ended_expired[node.trial][bin_of(age)] += 1
        self.undo(node)
        if age // 2**self.shift >= SLOTS // 4:
            for c, row in enumerate(self.open):
                merged = [0] * SLOTS
                for e, count in enumerate(row):
                    merged[(self.base + e) // 2 - self.base // 2] += count
                self.open[c] = merged
            self.base //= 2
            self.shift += 1

    def run(self, count: int) -> None:
        """A request ended that went through so many nodes that are counted."""
        self.squares += count * count
        self.total += count

    def tick(self) -> None:
        """A request is opened."""
        self.now += 1
        if self.now // 2**self.shift - self.base >= SLOTS:
            half = SLOTS // 2
            self.open = [[sum(row[: half + 1]), *row[half + 1 :], *[0] * half] for row in self.open]
            self.base += half
        if self.now % 8192 == 0:
            self.squares //= 2
            self.total //= 2
            self.ended_reused = [[n // 2 for n in row] for row in self.ended_reused]
            self.ended_expired = [[n // 2 for n in row] for row in self.ended_expired]
        if self.now % 16 == 0:
            self.planned = self._plan()

    def _plan(self) -> list[list[int]]:
        run = self.squares / self.total if self.total else 1.0
        weight = 10.0 * run
        at_risk = []
        for c in range(CLASSES):
            unused = [float(n) for n in self.ended_expired[c]]
            for e, count in enumerate(self.open[c]):
                if count > 0:
                    middle = (self.base + e) * 2**self.shift + 2**self.shift // 2
                    unused[bin_of(max(0, self.now - middle))] += count
            left = 0.0
            for b in range(BINS):
                left += self.ended_reused[c][b] + unused[b]
            row = []
            for b in range(BINS):
                row.append(left - 0.5 * unused[b])
                left -= self.ended_reused[c][b] + unused[b]
            at_risk.append(row)
        per_age = [2.0 * (EDGES[b + 1] - EDGES[b]) / (EDGES[b + 1] + EDGES[b] + 2) for b in range(BINS)]
        all_risk, all_reused = [0.0] * BINS, [0.0] * BINS
        for c in range(CLASSES):
            for b in range(BINS):
                all_risk[b] += at_risk[c][b]
                all_reused[b] += self.ended_reused[c][b]
        reused = expected = 0.0
        for b in range(BINS):
            reused += all_reused[b]
            expected += all_risk[b] * per_age[b]
        rate = (reused + weight * 0.3) / (expected + weight)
        prior = [min(1.0, (all_reused[b] + weight * rate * per_age[b]) / (all_risk[b] + weight)) for b in range(BINS)]
        return [self._index_of(self.ended_reused[c], at_risk[c], prior, weight) for c in range(CLASSES)]

    @staticmethod
    def _index_of(reused: list[int], at_risk: list[float], prior: list[float], weight: float) -> list[int]:
        """From every edge the largest slope of the curve (time spent, reuses found) to a later edge."""
        found, time, left = [0.0], [0.0], 1.0
        for b in range(BINS):
            hazard = min(1.0, (reused[b] + weight * prior[b]) / (at_risk[b] + weight))
            after = left * (1.0 - hazard)
            found.append(1.0 - after)
            time.append(time[-1] + 0.5 * (left + after) * (EDGES[b + 1] - EDGES[b]))
            left = after
        index = [0] * (BINS + 1)
        hull: list[int] = []
        for b in reversed(range(BINS + 1)):
            while len(hull) >= 2:
                i, j = hull[-1], hull[-2]
                if (found[j] - found[b]) * (time[i] - time[b]) < (found[i] - found[b]) * (time[j] - time[b]):
                    break
                hull.pop()
            if hull and time[hull[-1]] > time[b]:
                index[b] = int((found[hull[-1]] - found[b]) / (time[hull[-1]] - time[b]) * ONE)
            hull.append(b)
        return index

    def index(self, c: int, tick: int) -> int:
        """The index of a class at the age of what was used at ``tick``."""
        age = self.now - tick
        b = bin_of(age)
        low, high = EDGES[b], EDGES[b + 1]
        value = self.planned[c][b]
        if high - low > 1 and age < high:
            value += (self.planned[c][b + 1] - value) * (age - low) // (high - low)
        return value
