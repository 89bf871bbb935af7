"""Tables that nothing is cut out of: where the columns do not fit, each row becomes a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Cell = str | Text


class Sheet:
    """Rows under headers, as wide as they need to be and no wider than the terminal.

    Args:
        title: above the table.
        texts: headers of the columns that are aligned left; they come first.
        numbers: headers of the columns that are aligned right.
        prose: which of ``texts`` may be wrapped, and how narrow it may become; the others are never broken.
        spaced: an empty line between the rows.
    """

    def __init__(
        self,
        title: str,
        texts: Sequence[str],
        numbers: Sequence[str] = (),
        *,
        prose: Mapping[str, int] = MappingProxyType({}),
        spaced: bool = False,
    ) -> None:
        self.title = title
        self._texts = tuple(texts)
        self._headers = (*texts, *numbers)
        self._prose = dict(prose)
        self._spaced = spaced
        self._rows: list[tuple[Cell, ...]] = []

    def add(self, *cells: Cell) -> None:
        """One row, in the order of the headers."""
        assert len(cells) == len(self._headers)
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self.title, "bold")
        widths = [
            self._prose.get(header, max(cell_len(str(cell)) for cell in (header, *column)))
            for header, *column in zip(self._headers, *self._rows, strict=True)
        ]
        for gap in (1, 0):
            if sum(widths) + (gap + 1) * len(widths) - 1 <= options.max_width:
                yield self._table(widths, gap)
                return
        for i, row in enumerate(self._rows):
            if i and self._spaced:
                yield Text()
            yield row[0] if isinstance(row[0], Text) else Text(row[0], "bold")
            yield from self._lines(row, options.max_width - 2)

    def _table(self, widths: list[int], gap: int) -> Table:
        """``widths``: the least of every column; ``gap``: blanks between them beside the one that is always there."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), leading=int(self._spaced))
        for header, width in zip(self._headers, widths, strict=True):
            justify: Literal["left", "right"] = "left" if header in self._texts else "right"
            wraps = header in self._prose
            table.add_column(header, justify=justify, no_wrap=not wraps, min_width=width, overflow="fold")
        for row in self._rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table

    def _lines(self, row: tuple[Cell, ...], width: int) -> Iterator[RenderableType]:
        """The cells after the first one with their headers, as many to a line as fit."""
        line = Text()
        for header, cell in zip(self._headers[1:], row[1:], strict=True):
            if not str(cell):
                continue
            item = Text.assemble((f"{header} ", "dim"), cell)
            if line and line.cell_len + item.cell_len + 3 > width:
                yield Padding(line, (0, 0, 0, 2), expand=False)
                line = Text()
            line = Text.assemble(line, ", ", item) if line else item
        if line:
            yield Padding(line, (0, 0, 0, 2), expand=False)


def facts(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """Labels and values in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", overflow="fold")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, value)
    return grid
