"""The parts of the page that are plain HTML: figures, tables, and the frames that charts are drawn into."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from trainmux.ir import Attempt, PlanRecord, Profile, Timeline
from trainmux.reporting._plan_facts import (
    PlanLookup,
    attempt_cells,
    attempts_best_first,
    cheapest_seconds,
    curve_in_words,
    how_it_trains,
    left_out,
    over_limit,
    recomputed_bytes,
    seconds_per_member,
    swapped_bytes,
)
from trainmux.reporting._plan_page_data import Around
from trainmux.reporting._units import (
    NOTHING,
    counted,
    format_change,
    format_seconds,
    format_share,
    one_line,
)
from trainmux.sizes import format_bytes

NUMBER, SHORT, TEXT = "number", "short", "text"
"""Classes of columns in the page: a number; a word or two, never broken; names and sentences."""

Cell = tuple[str, float | str]
"""The text of a cell, and its sort key: text, or a number, which comes last where it is not finite."""


def escaped(text: str) -> str:
    """Text for an element's content or for an attribute in double quotes."""
    return html.escape(one_line(text), quote=True)


def _table(
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


def peak_in_use(timeline: Timeline, fixed_bytes: int) -> int | None:
    """The most bytes in use at once, with those of libraries and graphs; ``None`` without memory points."""
    totals = [
        sum(size for _, size in point.bytes_by_class) + point.workspace_bytes for point in timeline.memory
    ]
    return max(totals) + fixed_bytes if totals else None


def header(title: str, plan: PlanRecord, has_curve: bool) -> str:
    links = [
        ("timeline", "Timeline"),
        ("numbers", "Step in numbers"),
        ("partitions", "Partitions"),
        *([("budget", "What the budget costs")] if has_curve else []),
        ("tensors", "Tensors"),
    ]
    items = "".join(f'<li><a href="#{target}">{escaped(text)}</a></li>' for target, text in links)
    return (
        f'<header><h1>{escaped(title)}</h1><p class="lead">Policy {escaped(plan.policy)}: '
        f'{escaped(how_it_trains(plan))}.</p><nav aria-label="Sections"><ul>{items}</ul></nav></header>'
    )


def tiles(lookup: PlanLookup, predicted: Timeline, measured: Timeline | None) -> str:
    plan = lookup.plan
    step_note = f"{format_seconds(seconds_per_member(plan))} a member"
    if measured is not None:
        change = format_change(measured.seconds, predicted.seconds)
        step_note += f"; measured {format_seconds(measured.seconds)} ({change})"
    peak_note = f"of the budget's {format_bytes(plan.budget_bytes)}"
    if plan.budget_bytes:
        peak_note += f" ({format_share(plan.peak_bytes / plan.budget_bytes)})"
    stalled = format_share(plan.stall_seconds / plan.step_seconds) if plan.step_seconds else NOTHING
    swap_note = (
        f"{format_bytes(swapped_bytes(lookup))} each way, {format_share(plan.swap_overlap)} of the "
        "copy time overlaps compute"
        if plan.swaps
        else "nothing leaves the device"
    )
    again_note = (
        f"{format_bytes(recomputed_bytes(lookup))} in {format_seconds(plan.recompute_seconds)}, "
        f"{format_share(plan.recompute_share)} of the compute time"
        if plan.recomputes
        else "every node runs once"
    )
    return "".join(
        (
            '<dl class="tiles">',
            _tile("Step, predicted", format_seconds(plan.step_seconds), step_note),
            _tile("Reserved on the device", format_bytes(plan.peak_bytes), peak_note, _meter(plan)),
            _tile(
                "Nothing decided", format_bytes(plan.plain_peak_bytes), f"would be in use: {over_limit(plan)}"
            ),
            _tile("Compute is idle", format_seconds(plan.stall_seconds), f"{stalled} of the step"),
            _tile("Swapped", counted(len(plan.swaps), "tensor"), swap_note),
            _tile("Recomputed", counted(len(plan.recomputes), "tensor"), again_note),
            _tile("Host memory", format_bytes(plan.host_bytes), "for what is swapped out"),
            "</dl>",
        )
    )


def _tile(name: str, figure: str, note: str, extra: str = "") -> str:
    return (
        f'<div><dt>{escaped(name)}</dt><dd><div class="figure">{escaped(figure)}</div>'
        f'{extra}<div class="note">{escaped(note)}</div></dd></div>'
    )


def _meter(plan: PlanRecord) -> str:
    most = max(1, plan.budget_bytes)
    label = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
    return (
        f'<meter min="0" max="{most}" value="{min(plan.peak_bytes, most)}" aria-label="{escaped(label)}">'
        f"{escaped(label)}</meter>"
    )


def timeline_section(plan: PlanRecord, timelines: Sequence[Timeline], around: Sequence[Around]) -> str:
    memory = "".join(_memory_figure(number, plan, timeline) for number, timeline in enumerate(timelines))
    sources = " and ".join(timeline.source for timeline in timelines)
    lanes_label = (
        f"The lanes compute, device to host and host to device, {sources}. Left and right arrows go from "
        "instruction to instruction, up and down from lane to lane, Enter zooms to the one selected."
    )
    buttons = "".join(
        f'<button type="button" id="{name}" aria-label="{escaped(label)}">{escaped(text)}</button>'
        for name, label, text in (
            ("zoom-in", "Zoom in", "Zoom in"),
            ("zoom-out", "Zoom out", "Zoom out"),
            ("zoom-fit", "Show the whole step", "Whole step"),
            ("pan-left", "Move the window to earlier times", "← Earlier"),
            ("pan-right", "Move the window to later times", "Later →"),
        )
    )
    return (
        '<section id="timeline" aria-labelledby="timeline-title">'
        '<h2 id="timeline-title">One step on the clock</h2>'
        '<p class="help" id="timeline-help">All charts here share one window on the clock. Drag to move it; '
        "Ctrl and scroll, pinch or double-click to zoom. With a chart focused: + and − zoom, 0 shows the "
        "whole step, Shift with arrows moves the window, arrows walk. Where nodes are narrower than a "
        "pixel, a column of pixels shows their shares of the time.</p>"
        f'<div class="toolbar" role="group" aria-label="Window on the clock">{buttons}'
        '<output id="window"></output></div>'
        f'{memory}<ul class="legend" id="memory-legend" aria-label="Byte classes"></ul>'
        '<figure class="timed" id="lanes"><figcaption>Lanes'
        '<button type="button" id="clear-highlight" hidden></button></figcaption>'
        f'<canvas tabindex="0" role="application" aria-roledescription="Gantt chart" '
        f'aria-label="{escaped(lanes_label)}" aria-describedby="timeline-help"></canvas></figure>'
        '<ul class="legend" id="lanes-legend" aria-label="Lanes"></ul>'
        f"{''.join(_around_figure(found) for found in around)}</section>"
    )


def _around_figure(around: Around) -> str:
    when = {"prologue": "once before the first step", "epilogue": "once after the last step"}[around.name]
    caption = f"{around.name.capitalize()}, {when}: {format_seconds(around.timeline.seconds)}"
    label = f"{caption}. Left and right arrows go from node to node."
    return (
        f'<figure id="{around.name}"><figcaption>{escaped(caption)}</figcaption>'
        f'<canvas tabindex="0" role="application" aria-roledescription="Gantt chart" '
        f'aria-label="{escaped(label)}"></canvas></figure>'
    )


def _memory_figure(number: int, plan: PlanRecord, timeline: Timeline) -> str:
    peak = peak_in_use(timeline, plan.fixed_bytes)
    note = "" if peak is not None or not number else ": bytes as predicted, on the measured clock"
    in_words = f"at most {format_bytes(peak)} in use" if peak is not None else "no bytes were recorded"
    label = (
        f"Memory over time by byte class, {timeline.source}: {in_words}, {format_bytes(plan.peak_bytes)} "
        f"reserved, budget {format_bytes(plan.budget_bytes)}. Left and right arrows move along the clock."
    )
    return (
        f'<figure class="timed" id="memory-{number}">'
        f"<figcaption>Memory, {escaped(timeline.source + note)}</figcaption>"
        f'<canvas tabindex="0" role="application" aria-roledescription="stacked area chart" '
        f'aria-label="{escaped(label)}" aria-describedby="timeline-help"></canvas></figure>'
    )


def numbers_section(plan: PlanRecord, predicted: Timeline, measured: Timeline | None) -> str:
    timelines = [predicted] if measured is None else [predicted, measured]
    rows = [
        _compared("Step", [timeline.seconds for timeline in timelines]),
        _compared("Compute, recomputes included", [timeline.compute_seconds for timeline in timelines]),
        _compared("Recompute", [timeline.recompute_seconds for timeline in timelines]),
        _compared("Compute is idle", [timeline.stall_seconds for timeline in timelines]),
        _compared("Copies run", [timeline.copy_seconds for timeline in timelines]),
        _compared("Copies that overlap compute", [timeline.hidden_copy_seconds for timeline in timelines]),
    ]
    peaks = [peak_in_use(timeline, plan.fixed_bytes) for timeline in timelines]
    if any(peak is not None for peak in peaks):
        shown = [format_bytes(peak) if peak is not None else NOTHING for peak in peaks]
        numbers = [float(peak) if peak is not None else math.nan for peak in peaks]
        rows.append(_numbers_row("Most bytes in use", shown, numbers))
    columns = [f'<th scope="col" class="number">{escaped(name)}</th>' for name in _sources(timelines)]
    return (
        '<section id="numbers" aria-labelledby="numbers-title"><h2 id="numbers-title">Step in numbers</h2>'
        '<div class="table"><table><caption class="hidden-text">Times and bytes of one step</caption>'
        f"<thead><tr><td></td>{''.join(columns)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "</section>"
    )


def _sources(timelines: Sequence[Timeline]) -> list[str]:
    names = [timeline.source for timeline in timelines]
    return [*names, "difference"] if len(names) > 1 else names


def _compared(name: str, seconds: Sequence[float]) -> str:
    return _numbers_row(name, [format_seconds(value) for value in seconds], seconds)


def _numbers_row(name: str, shown: Sequence[str], numbers: Sequence[float]) -> str:
    cells = list(shown)
    if len(numbers) > 1:
        cells.append(format_change(numbers[1], numbers[0]))
    values = "".join(f'<td class="number">{escaped(cell)}</td>' for cell in cells)
    return f'<tr><th scope="row">{escaped(name)}</th>{values}</tr>'


def tensors_section() -> str:
    columns = {
        "Tensor": TEXT,
        "Sub-array": SHORT,
        "Class": SHORT,
        "Size": NUMBER,
        "Decision": SHORT,
        "Why": TEXT,
    }
    decisions = "".join(f"<option>{name}</option>" for name in ("kept", "swapped", "recomputed"))
    return (
        '<section id="tensors" aria-labelledby="tensors-title"><h2 id="tensors-title">Tensors</h2>'
        '<p class="help">A tensor that is swapped or recomputed can be shown in the timeline: choose its '
        "name. Behind a node stands the number of its sub-array.</p>"
        '<div class="filters" role="search" aria-label="Tensors to show">'
        '<label>Name or reason <input type="search" data-filter="text" autocomplete="off"></label>'
        '<label>Decision <select data-filter="decision"><option value="">all</option>'
        f"{decisions}</select></label>"
        '<label>Class <select data-filter="className"><option value="">all</option></select></label>'
        '<label>Sub-array <select data-filter="subArray"><option value="">all</option></select></label></div>'
        '<p class="help" data-role="count" role="status"></p>'
        f"{_table(columns, None, 'Tensors by size, with what the plan does with each')}"
        '<button type="button" data-role="more" hidden></button></section>'
    )


def partitions_section(plan: PlanRecord, profiles: Sequence[Profile]) -> str:
    rows: list[list[Cell]] = []
    for position, sub_array in enumerate(plan.partition):
        width, members = len(sub_array.members), ", ".join(sub_array.members)
        profile = _profile_in_words(profiles[sub_array.profile])
        rows.append([(str(position), position), (str(width), width), (members, members), (profile, profile)])
    columns = {"Sub-array": SHORT, "Width": SHORT, "Members": TEXT, "Profile": TEXT}
    sub_arrays = _table(columns, rows, "The sub-arrays of this plan")
    heading = f"Tried: {len(plan.attempts)}{left_out(plan)}" if plan.attempts else "Tried"
    tried = (
        _attempts_table(attempts_best_first(plan))
        if plan.attempts
        else '<p class="muted">Only this partition was considered.</p>'
    )
    return (
        '<section id="partitions" aria-labelledby="partitions-title">'
        '<h2 id="partitions-title">Partitions</h2><h3>Chosen</h3>'
        f"{sub_arrays}<h3>{escaped(heading)}</h3>{tried}</section>"
    )


def _profile_in_words(profile: Profile) -> str:
    return (
        f"{profile.source} on {profile.device.name}: {counted(len(profile.nodes), 'node')}, "
        f"{counted(len(profile.tensors), 'tensor')}"
    )


def _attempts_table(attempts: Sequence[Attempt]) -> str:
    columns = {
        **dict.fromkeys(("Policy", "Widths", "Multiplexing"), SHORT),
        **dict.fromkeys(("Step", "Peak", "Idle", "Recompute"), NUMBER),
        "Outcome": TEXT,
    }
    rows: list[list[Cell]] = []
    for one in attempts:
        texts = attempt_cells(one)
        numbers = (one.step_seconds, one.peak_bytes, one.stall_seconds, one.recompute_seconds)
        rows.append(list(zip(texts, (*texts[:3], *numbers, texts[-1]), strict=True)))
    chosen = [position for position, one in enumerate(attempts) if not one.lost_because]
    caption = "Every partition tried, and why it was not taken"
    return _table(columns, rows, caption, chosen[0] if chosen else -1)


def budget_section(plan: PlanRecord, curve: Sequence[tuple[int, float]]) -> str:
    if not curve:
        return ""
    fastest = cheapest_seconds(curve)
    rows: list[list[Cell]] = []
    for budget, seconds in sorted(curve):
        step = format_seconds(seconds) if math.isfinite(seconds) else "nothing fits"
        more = format_change(seconds, fastest)
        rows.append([(format_bytes(budget), budget), (step, seconds), (more, seconds)])
    budgets = [budget for budget, _ in sorted(curve)]
    chosen = budgets.index(plan.budget_bytes) if plan.budget_bytes in budgets else -1
    columns = {"Budget": NUMBER, "Step": NUMBER, "More than the fastest": NUMBER}
    table = _table(columns, rows, "What each budget costs", chosen)
    words = curve_in_words(curve)
    label = f"Step time against budget: {words}. Left and right arrows go from budget to budget."
    return (
        '<section id="budget" aria-labelledby="budget-title">'
        '<h2 id="budget-title">What the budget costs</h2>'
        f'<p class="muted">{escaped(words[0].upper() + words[1:])}.</p>'
        '<figure id="budget-curve"><canvas tabindex="0" role="application" aria-roledescription="line chart" '
        f'aria-label="{escaped(label)}"></canvas></figure>'
        f"<details><summary>As a table</summary>{table}</details></section>"
    )
