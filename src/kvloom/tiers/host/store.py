"""``HostStore``: the door of the host tier."""

from __future__ import annotations

import contextlib
import enum
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvloom.config import check_bytes, exact_size
from kvloom.errors import InputError
from kvloom.tiers.contract import Usage
from kvloom.tiers.host import arrays, pages
from kvloom.tiers.host.arrays import CHECK, FORM, GENERATION, GRADE, HELD, LENGTH, PAGE, RUN, STATE
from kvloom.tiers.host.books import Books
from kvloom.tiers.host.listing import catalogue, finding, places_by_layout, unit_of
from kvloom.tiers.host.publishing import Publisher, pages_of
from kvloom.tiers.host.reading import PLACE as HOST_PLACE
from kvloom.tiers.host.reading import about_places, read, seeds_of
from kvloom.tiers.values import (
    Batch,
    Digests,
    Found,
    Outcome,
    Places,
    Published,
    ReadResult,
    Result,
    Unit,
    check_digests,
    check_layout,
    no_places,
)
from kvloom.types import AnyArray, Grade, IntArray, PayloadForm

THREADS = 2


class Verify(enum.Enum):
    """Whether reads compare checksums."""

    ALWAYS = "always"
    NEVER = "never"
    """Only for measuring what checking costs: damaged memory is delivered as it is."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened so far: units evicted, objects quarantined, and times that all counts were made anew."""

    evicted: int
    quarantined: int
    recounts: int


def anonymous(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that the kernel hands out page by page when it is first written."""
    mapping = mmap.mmap(-1, n_bytes)
    with contextlib.suppress(OSError):  # a kernel without them; they only save time
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


class HostStore:
    """Prefix units in host memory.  Thread-safe; what is read is copied with neither the lock nor the GIL held.

    Args:
        capacity_bytes: of the memory and of all books about it, which are made at once and never grow.
        memory: makes uint8 memory ``[n]``, page-aligned; pinned where a device copies from it.
        verify: whether reads check.
        object_bytes: of an average object; the books have rows for as many of these as fit.  Smaller ones fit too, but
            not more of them.
        threads: that copy one read, 1 or 2.

    Raises InputError for a capacity of less than 256 KiB, and for memory that is not as it was asked for.
    """

    def __init__(
        self,
        capacity_bytes: int,
        memory: arrays.Memory | None = None,
        *,
        verify: Verify = Verify.ALWAYS,
        object_bytes: int = PAGE,
        threads: int = THREADS,
    ) -> None:
        check_bytes(capacity_bytes, "host")
        if capacity_bytes < arrays.MINIMUM:
            least = exact_size(arrays.MINIMUM)
            raise InputError(f"host: a tier of {exact_size(capacity_bytes)} is too small; use at least {least}")
        if object_bytes < PAGE or threads not in {1, 2}:
            raise InputError(f"a host tier takes objects of {PAGE} bytes or more on average, and 1 or 2 threads")
        count = arrays.pages_within(capacity_bytes, object_bytes)
        self._begin((memory or anonymous)(count * PAGE), count, object_bytes)
        self._publishing = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "kvloom-host") if threads > 1 else None
        self._verify = verify
        self._capacity = capacity_bytes
        self._closed = False

    def _begin(self, memory: npt.NDArray[np.uint8], count: int, object_bytes: int) -> None:
        self._books = Books(arrays.make(memory, count, object_bytes), memory)
        self._publisher = Publisher(self._books)

    @property
    def name(self) -> str:
        """``"host"``."""
        return "host"

    @property
    def durable(self) -> bool:
        """False: it ends with the process."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- the contract

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier.lookup``.  Places are good until their object goes or is rewritten; a read says so then."""
        check_layout(layout)
        check_digests(digests)
        if self._closed:
            nothing = np.zeros(len(digests), np.bool_)
            return Found(nothing, nothing.copy(), no_places(layout, HOST_PLACE))
        with self._books.lock:
            return finding(self._books, layout, digests, root)

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """See ``Tier.read``.

        Objects that are being read stay where they are, whatever is evicted meanwhile.  ``stop`` is asked every 4 MiB,
        also from a second thread.  Raises InputError when an object would not lie within ``into``.
        """
        ends = offsets + places.entries["length"].astype(np.int64)
        if len(offsets) != len(places) or (len(ends) and (offsets.min() < 0 or int(ends.max()) > len(into))):
            raise InputError("the objects do not fit at the offsets that they are to be read to")
        if into.dtype != np.uint8 or into.ndim != 1 or not into.flags.c_contiguous or not into.flags.writeable:
            raise InputError("objects are read into contiguous, writable uint8 memory of one dimension")
        if self._closed or not len(places):
            return ReadResult(np.full(len(places), Result.MISSING, np.uint8), 0, 0)
        check = self._verify is Verify.ALWAYS
        return read(self._books, places, into, offsets, stop, check=check, pool=self._pool)

    def publish(self, unit: Unit) -> Published:
        """See ``Tier.publish``; one unit after the other.  An object that is there stays, unless the new one is better.

        Raises only what a ``Fill`` raises; then nothing has changed.
        """
        with self._publishing:
            if self._closed:
                return Published(Outcome.UNAVAILABLE, reason="the tier is closed")
            return self._publisher.publish(unit)

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier.touch``."""
        with self._books.lock:
            n = self._books.unit_at(layout, digest)
            if n >= 0:
                self._books.use(n)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier.clear``."""
        with self._books.lock:
            if layout is None or root is None:
                gone = self._books.a.heap[: self._books.units].tolist()
            else:
                gone = self._books.units_below(self._books.root(layout, root))
            for n in gone:
                self._books.drop_unit(n)
        return len(gone)

    def usage(self) -> Usage:
        """See ``Tier.usage``; the bytes of the books are among those in use, also when nothing is held."""
        with self._books.lock:
            return Usage(self._books.bytes, self._capacity, self._books.objects, self._books.units)

    def close(self) -> None:
        """See ``Tier.close``.  A publication that is under way ends first.

        The memory goes when the last read ends and the last ``unit`` is gone.
        """
        self._closed = True
        with self._publishing:
            self._begin(anonymous(PAGE), 1, PAGE)
        if self._pool is not None:
            self._pool.shutdown()

    # ---------------------------------------------------------------- moving on

    def coldest(self, n_bytes: int) -> list[tuple[bytes, bytes]]:
        """(layout, digest) of the units that would have to go next for so many bytes to be free, in that order.

        Takes time for what it returns, however many units there are.
        """
        books, need = self._books, int(pages_of(np.array([n_bytes]))[0])
        made: list[tuple[bytes, bytes]] = []
        if need <= 0:
            return made
        with books.lock:
            for n, free in books.going():
                made.append((books.layout_of(n), books.digest_of(n)))
                need -= int(pages_of(books.a.obj[free, LENGTH]).sum())
                if need <= 0:
                    break
        return made

    def unit(self, layout: bytes, digest: bytes) -> Unit | None:
        """The unit that ends at a node, to be published elsewhere; None where none does or its books are damaged.

        Its payloads are ``Fill``s, which read and verify when they are asked, and raise StoreError for damaged memory.
        The objects stay in memory as long as the unit does, whatever is evicted.
        """
        return unit_of(self._books, layout, digest)

    def hits(self, layout: bytes, digest: bytes) -> float:
        """How often a unit was used since it was published, earlier uses counting less; 0 where none ends there."""
        with self._books.lock:
            n = self._books.unit_at(layout, digest)
            # Its publication counts as the first use, so what was never used again has exactly that.
            return self._books.heat(n) if n >= 0 and self._books.a.heat[n, arrays.HEAT] > 1 else 0.0

    def cold_objects(self, below: float, most_bytes: int) -> list[Places]:
        """Objects that are as they came (RAW), and that no unit needs whose counter is ``below`` or more.

        Those of the units that go next come first, until they are ``most_bytes`` together; one value for every layout.
        """
        books, need = self._books, most_bytes
        found = [np.empty(0, np.int64)]
        with books.lock:
            for n, free in books.going():
                if need <= 0 or books.heat(n) >= below:  # what goes later is used more
                    break
                found.append(free[books.a.obj[free, FORM] == PayloadForm.RAW])
                need -= int(books.a.obj[found[-1], LENGTH].sum())
            return places_by_layout(books, np.concatenate(found))

    def rewrite(
        self, places: Places, payloads: Sequence[bytes | memoryview | AnyArray], form: PayloadForm, grade: Grade
    ) -> int:
        """Put other bytes in the place of objects, such as a cold form, and free the pages that this saves.

        Each object changes at one moment; units stay whole.  Those that are gone, are being read, or would become
        larger stay as they are.  Returns how many changed; their former places are ``MISSING`` from then on.
        """
        about = about_places(places)
        about[:, 3], about[:, 4] = int(form), int(grade)
        parts = [np.frombuffer(np.ascontiguousarray(p) if isinstance(p, np.ndarray) else p, np.uint8) for p in payloads]
        about[:, 5] = [len(part) for part in parts]
        seeds = seeds_of(places.layout, np.require(places.digests, requirements=["C", "W"]).view(np.int64), about)
        count, books = 0, self._books
        a = books.a
        if self._closed:
            return 0
        sizes = pages_of(about[:, 5])
        for i, (data, seed) in enumerate(zip(parts, seeds.tolist(), strict=True)):
            x, size = int(places.entries["row"][i]), int(about[i, 5])
            check = xxhash.xxh3_128_digest(data.data, seed)
            if x >= len(a.obj):
                continue
            with books.lock:
                row = a.obj[x]
                same = books is self._books and row[STATE] == HELD and row[GENERATION] == about[i, 0]
                fits = sizes[i] <= int(pages_of(np.array([int(row[LENGTH])]))[0]) and size > 0
                if not same or not fits or row[arrays.PINS] > 0:
                    continue
                row[FORM], row[GRADE], row[LENGTH] = int(form), int(grade), size
                row[GENERATION] = (int(row[GENERATION]) + 1) & 0x7FFFFFFF
                a.obj64[x, CHECK : CHECK + 2] = np.frombuffer(check, np.int64)
                pages.scatter(a, int(row[RUN]), 0, size, data.ctypes.data)
                pages.cut_pages(a, int(row[RUN]), int(sizes[i]))
                count += 1
        return count

    def catalogue(self) -> Iterator[Batch]:
        """Everything that is held, about a thousand nodes at a time; what changes meanwhile may be seen or not."""
        return catalogue(self._books)

    def counts(self) -> Counts:
        """What happened so far."""
        return Counts(self._books.evicted, self._books.quarantined, self._books.recounts)

    def check_integrity(self) -> None:
        """The books are consistent; AssertionError otherwise.  Looks at everything."""
        with self._books.lock:
            self._books.check_integrity()
