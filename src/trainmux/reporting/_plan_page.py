"""A plan as one HTML page that opens offline: memory and lanes on the clock, tensors, partitions, budget.

Style, script and data stand in the page itself; its content security policy lets nothing else in, and no
script but the page's own run. ``page/page.html`` is the frame that everything is put into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import Template

from trainmux.ir import PlanRecord, Profile, Program, Timeline
from trainmux.reporting._page import NUMBER, SHORT, TEXT, Cell, digest, escaped, read, table
from trainmux.reporting._plan_facts import PlanFacts, attempt_cells, cheapest_seconds, curve_in_words
from trainmux.reporting._plan_page_data import Around, page_data, script_safe
from trainmux.reporting._units import NOTHING, counted, format_change, format_seconds
from trainmux.sizes import format_bytes

_STYLES = ("frame.css", "charts.css", "tables.css")
_SCRIPTS = (
    *("format.js", "model.js", "view.js", "memory.js", "lanes.js"),
    *("around.js", "sorting.js", "tables.js", "budget.js", "main.js"),
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
    facts = PlanFacts.of(plan, profiles)
    timelines = [predicted] if measured is None else [predicted, measured]
    parts = (("prologue", program.prologue, prologue), ("epilogue", program.epilogue, epilogue))
    around = [Around(name, part, line) for name, part, line in parts if line is not None and line.spans]
    style = "\n".join(map(read, _STYLES))
    # All scripts in one function: nothing of the page is reachable, or changeable, from outside of it.
    script = "(() => {\n'use strict';\n" + "\n".join(map(read, _SCRIPTS)) + "})();\n"
    return Template(read("page.html")).substitute(
        policy=f"default-src 'none'; style-src 'sha256-{digest(style)}'; "
        f"script-src 'sha256-{digest(script)}'; base-uri 'none'; form-action 'none'",
        title=escaped(title),
        style=style,
        script=script,
        data=script_safe(page_data(facts, program.body, timelines, around, budget_curve)),
        lead=f"Policy {escaped(plan.policy)}: {escaped(facts.how_it_trains)}.",
        links=_links(bool(budget_curve)),
        tiles=_tiles(facts, timelines),
        memory="\n".join(_memory_figure(number, plan, line) for number, line in enumerate(timelines)),
        lanes=_lanes_chart(timelines),
        around="\n".join(_around_figure(one) for one in around),
        numbers=_numbers(plan, timelines),
        chosen=_sub_arrays(facts),
        tried_title=f"Tried: {len(plan.attempts)}{facts.left_out}" if plan.attempts else "Tried",
        tried=_attempts(facts),
        budget=_budget(plan, budget_curve) if budget_curve else "",
        tensors=_tensors(),
    )


def _canvas(kind: str, label: str, described_by: str = "") -> str:
    described = f' aria-describedby="{described_by}"' if described_by else ""
    return (
        f'<canvas tabindex="0" role="application" aria-roledescription="{kind}" '
        f'aria-label="{escaped(label)}"{described}></canvas>'
    )


def _links(has_curve: bool) -> str:
    titles = {"timeline": "Timeline", "numbers": "Step in numbers", "partitions": "Partitions"}
    titles |= {"budget": "What the budget costs"} if has_curve else {}
    titles["tensors"] = "Tensors"
    return "".join(f'<li><a href="#{target}">{text}</a></li>' for target, text in titles.items())


def _tiles(facts: PlanFacts, timelines: Sequence[Timeline]) -> str:
    plan = facts.plan
    step_note = facts.per_member
    for measured in timelines[1:]:
        change = format_change(measured.seconds, timelines[0].seconds)
        step_note += f"; measured {format_seconds(measured.seconds)} ({change})"
    plain = format_bytes(plan.plain_peak_bytes)
    swaps = facts.swapped if plan.swaps else "nothing leaves the device"
    recomputes = facts.recomputed if plan.recomputes else "every node runs once"
    tiles = (
        ("Step, predicted", format_seconds(plan.step_seconds), step_note),
        ("Reserved on the device", format_bytes(plan.peak_bytes), facts.of_budget),
        ("Nothing decided", plain, f"would be in use: {facts.over_limit}"),
        ("Compute is idle", format_seconds(plan.stall_seconds), facts.stalled),
        ("Swapped", counted(len(plan.swaps), "tensor"), swaps),
        ("Recomputed", counted(len(plan.recomputes), "tensor"), recomputes),
        ("Host memory", format_bytes(plan.host_bytes), "for what is swapped out"),
    )
    return "".join(
        f'<div><dt>{name}</dt><dd><div class="figure">{figure}</div>'
        f"{_meter(plan) if number == 1 else ''}"
        f'<div class="note">{escaped(note)}</div></dd></div>'
        for number, (name, figure, note) in enumerate(tiles)
    )


def _meter(plan: PlanRecord) -> str:
    most = max(1, plan.budget_bytes)
    label = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
    value = min(plan.peak_bytes, most)
    return f'<meter min="0" max="{most}" value="{value}" aria-label="{label}">{label}</meter>'


def _peak_in_use(timeline: Timeline, fixed_bytes: int) -> int | None:
    """The most bytes in use at once, with those of libraries and graphs; ``None`` without memory points."""
    totals = [
        sum(size for _, size in point.bytes_by_class) + point.workspace_bytes for point in timeline.memory
    ]
    return max(totals) + fixed_bytes if totals else None


def _memory_figure(number: int, plan: PlanRecord, timeline: Timeline) -> str:
    peak = _peak_in_use(timeline, plan.fixed_bytes)
    note = "" if peak is not None or not number else ": bytes as predicted, on the measured clock"
    in_words = f"at most {format_bytes(peak)} in use" if peak is not None else "no bytes were recorded"
    label = (
        f"Memory over time by byte class, {timeline.source}: {in_words}, {format_bytes(plan.peak_bytes)} "
        f"reserved, budget {format_bytes(plan.budget_bytes)}. Left and right arrows move along the clock."
    )
    return (
        f'<figure class="timed" id="memory-{number}">'
        f"<figcaption>Memory, {escaped(timeline.source + note)}</figcaption>"
        f"{_canvas('stacked area chart', label, 'timeline-help')}</figure>"
    )


def _lanes_chart(timelines: Sequence[Timeline]) -> str:
    label = (
        f"The lanes compute, device to host and host to device, "
        f"{' and '.join(timeline.source for timeline in timelines)}. Left and right arrows go from "
        "instruction to instruction, up and down from lane to lane, Enter zooms to the one selected."
    )
    return _canvas("Gantt chart", label, "timeline-help")


def _around_figure(around: Around) -> str:
    when = {"prologue": "once before the first step", "epilogue": "once after the last step"}[around.name]
    caption = f"{around.name.capitalize()}, {when}: {format_seconds(around.timeline.seconds)}"
    chart = _canvas("Gantt chart", f"{caption}. Left and right arrows go from node to node.")
    return f'<figure id="{around.name}"><figcaption>{escaped(caption)}</figcaption>{chart}</figure>'


def _numbers(plan: PlanRecord, timelines: Sequence[Timeline]) -> str:
    """Times and bytes of a step, predicted and measured side by side."""
    fields = {
        "Step": "seconds",
        "Compute, recomputes included": "compute_seconds",
        "Recompute": "recompute_seconds",
        "Compute is idle": "stall_seconds",
        "Copies run": "copy_seconds",
        "Copies that overlap compute": "hidden_copy_seconds",
    }
    rows = []
    for name, field in fields.items():
        seconds = [getattr(timeline, field) for timeline in timelines]
        rows.append((name, [format_seconds(value) for value in seconds], seconds))
    peaks = [_peak_in_use(timeline, plan.fixed_bytes) for timeline in timelines]
    if any(peak is not None for peak in peaks):
        shown = [NOTHING if peak is None else format_bytes(peak) for peak in peaks]
        rows.append(("Most bytes in use", shown, [math.nan if peak is None else peak for peak in peaks]))
    heads = [timeline.source for timeline in timelines] + ["difference"] * (len(timelines) - 1)
    body = ""
    for name, cells, numbers in rows:
        cells += [format_change(numbers[1], numbers[0])] if len(numbers) > 1 else []
        values = "".join(f'<td class="number">{escaped(cell)}</td>' for cell in cells)
        body += f'<tr><th scope="row">{name}</th>{values}</tr>'
    head = "".join(f'<th scope="col" class="number">{escaped(name)}</th>' for name in heads)
    return (
        '<div class="table"><table><caption class="hidden-text">Times and bytes of one step</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _sub_arrays(facts: PlanFacts) -> str:
    rows: list[list[Cell]] = []
    for position, sub_array in enumerate(facts.plan.partition):
        profile, width = facts.profile(position), len(sub_array.members)
        made_of = f"{counted(len(profile.nodes), 'node')}, {counted(len(profile.tensors), 'tensor')}"
        texts = (", ".join(sub_array.members), f"{profile.source} on {profile.device.name}: {made_of}")
        rows.append([(str(position), position), (str(width), width), *((text, text) for text in texts)])
    columns = {"Sub-array": SHORT, "Width": SHORT, "Members": TEXT, "Profile": TEXT}
    return table(columns, rows, "The sub-arrays of this plan")


def _attempts(facts: PlanFacts) -> str:
    if not facts.attempts:
        return '<p class="muted">Only this partition was considered.</p>'
    columns = {
        **dict.fromkeys(("Policy", "Widths", "Multiplexing"), SHORT),
        **dict.fromkeys(("Step", "Peak", "Idle", "Recompute"), NUMBER),
        "Outcome": TEXT,
    }
    rows: list[list[Cell]] = []
    for one in facts.attempts:
        texts = attempt_cells(one)
        numbers = (one.step_seconds, one.peak_bytes, one.stall_seconds, one.recompute_seconds)
        rows.append(list(zip(texts, (*texts[:3], *numbers, texts[-1]), strict=True)))
    chosen = -1 if facts.attempts[0].lost_because else 0
    return table(columns, rows, "Every partition tried, and why it was not taken", chosen)


def _budget(plan: PlanRecord, curve: Sequence[tuple[int, float]]) -> str:
    fastest = cheapest_seconds(curve)
    rows: list[list[Cell]] = []
    for budget, seconds in sorted(curve):
        step = format_seconds(seconds) if math.isfinite(seconds) else "nothing fits"
        more = format_change(seconds, fastest)
        rows.append([(format_bytes(budget), budget), (step, seconds), (more, seconds)])
    budgets = [budget for budget, _ in sorted(curve)]
    chosen = budgets.index(plan.budget_bytes) if plan.budget_bytes in budgets else -1
    columns = dict.fromkeys(("Budget", "Step", "More than the fastest"), NUMBER)
    words = curve_in_words(curve)
    label = f"Step time against budget: {words}. Left and right arrows go from budget to budget."
    return (
        '<section id="budget" aria-labelledby="budget-title">'
        '<h2 id="budget-title">What the budget costs</h2>'
        f'<p class="muted">{escaped(words[0].upper() + words[1:])}.</p>'
        f'<figure id="budget-curve">{_canvas("line chart", label)}</figure>'
        f"<details><summary>As a table</summary>{table(columns, rows, 'What each budget costs', chosen)}"
        "</details></section>"
    )


def _tensors() -> str:
    columns = {
        "Tensor": TEXT,
        "Sub-array": SHORT,
        "Class": SHORT,
        "Size": NUMBER,
        "Decision": SHORT,
        "Why": TEXT,
    }
    return table(columns, None, "Tensors by size, with what the plan does with each")
