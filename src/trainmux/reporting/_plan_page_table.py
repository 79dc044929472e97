"""Tables of the page: headers that sort, cells that carry their label for narrow windows."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainmux.reporting._units import one_line


def escaped(text: str) -> str:
    """Text for an element's content or for an attribute in double quotes."""
    return html.escape(one_line(text), quote=True)


class Kind(Enum):
    """The layout of a column; the value is its class in the page."""

    NUMBER = "number"
    SHORT = "short"
    """A word or two, never broken."""
    TEXT = "text"
    """Names and sentences: gets the room that is left, and a line of its own on a card."""


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and its sort key: a number, last where it is not finite, or else the text."""

    text: str
    order: float | None = None


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    is_chosen: bool = False


def table(columns: Sequence[Column], rows: Sequence[Row], *, caption: str) -> str:
    """A table that sorts by each of its columns. On a narrow window each row becomes a card."""
    head = "".join(_header(column) for column in columns)
    body = "".join(_row(columns, row) for row in rows)
    return (
        f'<div class="table"><table class="sortable cards">'
        f'<caption class="hidden-text">{escaped(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def empty_table(columns: Sequence[Column], *, caption: str) -> str:
    """A table whose rows the page's script fills in."""
    head = "".join(_header(column) for column in columns)
    return (
        f'<div class="table"><table class="cards"><caption class="hidden-text">{escaped(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody></tbody></table></div>"
    )


def _header(column: Column) -> str:
    return (
        f'<th scope="col" aria-sort="none" class="{column.kind.value}">'
        f'<button type="button">{escaped(column.name)}</button></th>'
    )


def _row(columns: Sequence[Column], row: Row) -> str:
    cells = "".join(_cell(column, cell) for column, cell in zip(columns, row.cells, strict=True))
    chosen = ' class="chosen"' if row.is_chosen else ""
    return f"<tr{chosen}>{cells}</tr>"


def _cell(column: Column, cell: Cell) -> str:
    if cell.order is None:
        order = cell.text
    else:
        order = str(cell.order) if math.isfinite(cell.order) else ""
    return (
        f'<td class="{column.kind.value}" data-label="{escaped(column.name)}" data-sort="{escaped(order)}">'
        f"<div>{escaped(cell.text)}</div></td>"
    )
