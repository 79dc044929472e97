"""Parts of all pages: their files, texts made safe for HTML, tables."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from trainmux.reporting._units import one_line

NUMBER, SHORT, TEXT = "number", "short", "text"
"""Classes of columns in the page: a number; a word or two, never broken; names and sentences."""

Cell = tuple[str, float | str]
"""The text of a cell, and its sort key: text, or a number, which comes last where it is not finite."""


@cache
def read(name: str) -> str:
    """A file of the pages."""
    return files("trainmux.reporting").joinpath("page", name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """The hash by which a content security policy knows a style or script."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def escaped(text: str) -> str:
    """Text for an element's content or for an attribute in double quotes."""
    return html.escape(one_line(text), quote=True)


def table(
    columns: Mapping[str, str], rows: Sequence[Sequence[Cell]] | None, caption: str, chosen: int = -1
) -> str:
    """A table that sorts by each of its columns; on a narrow window each row becomes a card.

    ``columns`` are classes by name; the row at ``chosen`` is marked. Without ``rows`` the page's script fills
    the table.
    """
    head = "".join(
        f'<th scope="col" aria-sort="none" class="{kind}"><button type="button">{escaped(name)}</button></th>'
        for name, kind in columns.items()
    )
    body = ""
    for position, row in enumerate(rows or ()):
        cells = "".join(
            f'<td class="{kind}" data-label="{escaped(name)}" data-sort="{escaped(_sort_key(order))}">'
            f"<div>{escaped(text)}</div></td>"
            for (name, kind), (text, order) in zip(columns.items(), row, strict=True)
        )
        mark = ' class="chosen"' if position == chosen else ""
        body += f"<tr{mark}>{cells}</tr>"
    kind = "cards" if rows is None else "sortable cards"
    return (
        f'<div class="table"><table class="{kind}"><caption class="hidden-text">{escaped(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _sort_key(order: float | str) -> str:
    return order if isinstance(order, str) else str(order) if math.isfinite(order) else ""
