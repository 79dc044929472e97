"""A plan as one HTML page that opens offline: memory and lanes on the clock, tensors, partitions, budget.

Style, script and data stand in the page itself; its content security policy lets nothing else in, and no
script but the page's own run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from trainmux.ir import PlanRecord, Profile, Program, Timeline
from trainmux.reporting import _plan_page_sections as sections
from trainmux.reporting._plan_facts import PlanLookup
from trainmux.reporting._plan_page_data import Around, page_data, script_safe

_STYLES = ("frame.css", "charts.css", "tables.css")
_SCRIPTS = (
    "format.js",
    "model.js",
    "view.js",
    "memory.js",
    "lanes.js",
    "around.js",
    "tables.js",
    "budget.js",
    "main.js",
)


def plan_page(
    plan: PlanRecord,
    program: Program,
    profiles: Sequence[Profile],
    predicted: Timeline,
    *,
    measured: Timeline | None = None,
    prologue: Timeline | None = None,
    epilogue: Timeline | None = None,
    budget_curve: Sequence[tuple[int, float]] = (),
    title: str = "trainmux plan",
) -> str:
    """The page, as text to be written as UTF-8.

    ``profiles`` are those that the plan was made from; ``predicted`` and ``measured`` are timelines of the
    program's body, ``prologue`` and ``epilogue`` of what a ring runs once before and after it; one in which
    nothing runs is not shown. ``budget_curve`` holds (budget in bytes, seconds a step); a time that is
    not finite stands for a budget that nothing fits. Refused with `PlanError`: profiles, a program or
    timelines that do not belong to the plan.
    """
    lookup = PlanLookup.of(plan, profiles)
    timelines = [predicted] if measured is None else [predicted, measured]
    around = [
        Around(name, part, timeline)
        for name, part, timeline in (
            ("prologue", program.prologue, prologue),
            ("epilogue", program.epilogue, epilogue),
        )
        if timeline is not None and timeline.spans
    ]
    data = script_safe(page_data(lookup, program.body, timelines, around, budget_curve))
    style, script = _style(), _script()
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{sections.escaped(title)}</title>",
            f"<style>{style}</style></head>",
            '<body><a class="skip" href="#timeline">Skip to the timeline</a>',
            sections.header(title, plan, bool(budget_curve)),
            "<main>",
            sections.tiles(lookup, predicted, measured),
            "<noscript><p>The charts and the table of tensors need JavaScript.</p></noscript>",
            sections.timeline_section(plan, timelines, around),
            sections.numbers_section(plan, predicted, measured),
            sections.partitions_section(plan, lookup.profiles),
            sections.budget_section(plan, budget_curve),
            sections.tensors_section(),
            "</main>",
            '<div id="tooltip" role="tooltip" hidden></div>',
            '<div id="announcer" class="hidden-text" role="status" aria-live="polite"></div>',
            f'<script type="application/json" id="plan-data">{data}</script>',
            f"<script>{script}</script>",
            "</body></html>",
            "",
        )
    )


@cache
def _style() -> str:
    return "\n".join(_read(name) for name in _STYLES)


@cache
def _script() -> str:
    """All scripts in one function: nothing of the page is reachable, or changeable, from outside of it."""
    return "(() => {\n'use strict';\n" + "\n".join(_read(name) for name in _SCRIPTS) + "})();\n"


def _read(name: str) -> str:
    return files("trainmux.reporting").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
