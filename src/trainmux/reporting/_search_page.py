"""The results of a search as one HTML page that opens offline: key figures, charts by Plotly, a table.

Plotly's script stands in the page itself; the content security policy lets nothing else in. (Some of Plotly's
charts compile code and all of them set styles, which the policy allows.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from trainmux.reporting._page import Cell, escaped, read, table

_STYLES = ("frame.css", "charts.css", "tables.css", "search.css")
_SCRIPTS = ("format.js", "sorting.js", "search.js")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Chart:
    """A figure as Plotly's JSON, or a text that says why there is none."""

    title: str
    figure: str = ""
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Charts under one heading, which a link at the top of the page leads to."""

    key: str
    title: str
    help: str
    charts: Sequence[Chart]


def search_page(
    *,
    title: str,
    lead: str,
    tiles: Sequence[tuple[str, str, str]],
    sections: Sequence[Section],
    columns: Mapping[str, str],
    rows: Sequence[Sequence[Cell]],
    has_best: bool,
    plotly: str,
) -> str:
    """The page, as text to be written as UTF-8.

    ``tiles`` are names, figures and notes; ``columns`` and ``rows`` are the table of trials, the best one
    first where ``has_best``; ``plotly`` is Plotly's own script.
    """
    links = [(section.key, section.title) for section in sections] + [("trials", "Trials")]
    script = "(() => {\n'use strict';\n" + "\n".join(map(read, _SCRIPTS)) + "})();\n"
    return Template(read("search.html")).substitute(
        policy=_POLICY,
        title=escaped(title),
        lead=escaped(lead),
        style="\n".join(map(read, _STYLES)),
        plotly=plotly,
        script=script,
        links="".join(f'<li><a href="#{key}">{escaped(text)}</a></li>' for key, text in links),
        tiles="".join(
            f'<div><dt>{escaped(name)}</dt><dd><div class="figure">{escaped(figure)}</div>'
            f'<div class="note">{escaped(note)}</div></dd></div>'
            for name, figure, note in tiles
        ),
        sections="\n".join(map(_section, sections)),
        trials=table(columns, rows, "All trials, best first", 0 if has_best else -1),
    )


def _section(section: Section) -> str:
    charts = "".join(_chart(f"{section.key}-{number}", chart) for number, chart in enumerate(section.charts))
    return (
        f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
        f'<h2 id="{section.key}-title">{escaped(section.title)}</h2>'
        f'<p class="help">{escaped(section.help)}</p>{charts}</section>'
    )


def _chart(key: str, chart: Chart) -> str:
    caption = f"<figcaption>{escaped(chart.title)}</figcaption>" if chart.title else ""
    if not chart.figure:
        return f'<figure>{caption}<p class="muted">{escaped(chart.note)}</p></figure>'
    data = chart.figure.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        f'<figure>{caption}<div class="plot" id="{key}" role="img" aria-label="{escaped(chart.title)}"></div>'
        f'<script type="application/json" data-for="{key}">{data}</script></figure>'
    )
