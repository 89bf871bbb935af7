"""Reading a recording of a run: what a manager was, and what was done to it, call by call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvloom.errors import ConfigError, SpecError
from kvloom.kinds import state_of
from kvloom.manager.events import Event, Made, Open
from kvloom.replay.codec import End, entry_from, made_from
from kvloom.replay.lines import Lines, fail_at, json_object

_WHAT = "a line of a recording is an object that begins with op"


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of an engine, as it was written down.

    Attributes:
        path: the file.
        made: the manager of the run.
        lines, events: line numbers and calls, in order.
        end: the counters of the manager at the end; None when the run was interrupted.
        end_line: its line, else the last one.
    """

    path: Path
    made: Made
    lines: tuple[int, ...]
    events: tuple[Event, ...]
    end: End | None
    end_line: int

    def __len__(self) -> int:
        return len(self.events)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    def opened(self) -> tuple[Open, ...]:
        """The requests that were opened, also those that were refused."""
        return tuple(event for event in self.events if isinstance(event, Open))

    def calls(self) -> Counter[str]:
        """How often each call was made, by the name of its event."""
        return Counter(type(event).__name__ for event in self.events)


def read_recording(path: Path, lines: Lines) -> Recording:
    """Read a recording; ``lines`` are those of the file, from the first on.

    Raises InputError with the line: not whole, unknown or missing fields, values of other types or out of range.
    """
    at, text = next(lines)
    fail = fail_at(path, at)
    try:
        made = made_from(json_object(text, fail, _WHAT), fail)
        for group in made.spec.groups:
            state_of(group)  # whether its geometry fits its kind
    except (SpecError, ConfigError) as error:
        fail(f"{error}; the line was changed: record the run again")
    numbers: list[int] = []
    events: list[Event] = []
    end: End | None = None
    for at, text in lines:
        fail = fail_at(path, at)
        if end is not None:
            fail("after the end of the recording; delete the line")
        entry = entry_from(json_object(text, fail, _WHAT), fail)
        if isinstance(entry, End):
            end = entry
        else:
            numbers.append(at)
            events.append(entry)
    return Recording(path, made, tuple(numbers), tuple(events), end, at)
