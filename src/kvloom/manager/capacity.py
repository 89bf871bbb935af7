"""How much of the device tier is held, what fits into it, and the errors that say so with the numbers."""

from __future__ import annotations

import numpy as np

from kvloom.core import sweep
from kvloom.core.arrays import Arrays
from kvloom.core.fields import FREE_PAGES, USED
from kvloom.core.geometry import fits, smallest_arena, split_note
from kvloom.errors import CapacityError
from kvloom.manager.roster import Roster
from kvloom.manager.tickets import Tickets
from kvloom.manager.transfers import Transfers
from kvloom.plan import ArenaGeometry
from kvloom.spec.footprint import peak_bytes
from kvloom.spec.model_spec import ModelSpec


class Capacity:
    """What one manager's tier can hold, and what holds it now."""

    def __init__(
        self,
        spec: ModelSpec,
        geometry: ArenaGeometry,
        cap: int,
        arrays: Arrays,
        holders: tuple[Roster, Tickets, Transfers],
    ) -> None:
        self._spec, self._geometry, self._cap = spec, geometry, cap
        self._arrays = arrays
        self._roster, self._tickets, self._transfers = holders
        self._admitted = 0

    # ---------------------------------------------------------------- what fits

    def fits(self, tokens: int) -> bool:
        """Whether a request of ``tokens`` tokens fits when it is alone."""
        return fits(self._spec, self._geometry, tokens)

    def peak_bytes(self, tokens: int) -> int:
        """Bytes that a request of ``tokens`` tokens holds at its peak, alone and without a hit."""
        return peak_bytes(self._spec, tokens, self._spec.segment_tokens)

    def tier_needed(self, tokens: int) -> int:
        """Bytes from which on a tier holds a request of ``tokens`` tokens; the cap when it fits."""
        return self._cap if self.fits(tokens) else smallest_arena(self._spec, tokens)

    def admit(self, tokens: int) -> None:
        """Raise CapacityError for a prompt that can never fit."""
        if tokens <= self._admitted:
            return
        if self.fits(tokens):
            self._admitted = tokens
            return
        needed = smallest_arena(self._spec, tokens)
        raise self._error(
            f"a prompt of {tokens} tokens can never fit into the device tier of {self._cap} bytes; its state takes "
            f"{self.peak_bytes(tokens)} bytes at its peak, which needs a tier of {needed} bytes: make it that "
            f"large, or the prompt shorter{split_note(self._spec, self._geometry)}",
            self.in_use(),
            needed,
            never_fits=True,
        )

    # ---------------------------------------------------------------- what is held

    def fill(self) -> float:
        """Share of the arena whose pages are in use, for cached state included."""
        a, geometry = self._arrays, self._geometry
        if geometry.static_split:
            return int((a.group[:, USED] * geometry.slot_bytes).sum()) / geometry.arena_bytes
        return 1.0 - int(a.scalars[FREE_PAGES]) / len(a.page)

    def in_use(self) -> int:
        """Bytes of the slots that cannot be evicted now."""
        running = self._roster.nodes().values()
        ends = np.array([*running, *self._tickets.nodes(), *self._transfers.nodes()], dtype=np.int64)
        return int(sweep.bytes_held(self._arrays, ends, self._geometry.slot_bytes))

    # ---------------------------------------------------------------- what does not fit

    def no_room(self, group: int, tokens: int, doing: str) -> CapacityError:
        """The error for a group that could not get a slot because everything is in use."""
        possible = self.fits(tokens)
        needed = self.peak_bytes(tokens) if possible else smallest_arena(self._spec, tokens)
        in_use = self.in_use()
        return self._error(
            f"no room to {doing}: group {self._spec.groups[group].name!r} has no free slot and {in_use} of {self._cap} "
            f"bytes are held by {len(self._roster)} running sequences; {tokens} tokens need {needed} bytes; close a "
            f"sequence or make the device tier larger{split_note(self._spec, self._geometry)}",
            in_use,
            needed,
            never_fits=not possible,
        )

    def no_row(self) -> CapacityError:
        """The error for one sequence more than the block tables have rows."""
        return self._error(
            f"{len(self._roster)} sequences are running, the most this manager was made for; close one, "
            "or make it with a larger max_sequences",
            self.in_use(),
        )

    def no_node(self) -> CapacityError:
        """The error for an index whose every node is in use."""
        return self._error(
            f"the prefix index is full ({len(self._arrays.node)} nodes, all in use); "
            "make the manager with more max_nodes",
            self.in_use(),
        )

    def _error(self, text: str, in_use: int, needed: int = 0, *, never_fits: bool = False) -> CapacityError:
        return CapacityError(text, needed=needed, cap=self._cap, in_use=in_use, never_fits=never_fits)
