"""The page of a search: which charts its results give, and what stands in the table."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainmux.errors import ConfigError, first_line
from trainmux.fleet import value_text
from trainmux.reporting import NUMBER, SHORT, TEXT, Cell, Chart, Section, counted, search_page
from trainmux.search._search import metric_of
from trainmux.search._trial import Trial, TrialState

if TYPE_CHECKING:
    import optuna

    from trainmux.search._results import Results

_FEW = 12
"""So many trials get a colour and a name of their own in the charts."""
_MOST_POINTS = 60
"""Of a curve, where there are many."""
_LOG_RATIO = 10
"""Values that span more may be drawn on a logarithmic scale, if all are positive."""
_MOST_CHOICES = 6
"""Whole numbers that a parameter takes, where each has a place of its own on an axis."""
_MOST_TICKS = 12
_LEFT = (TrialState.RUNNING, TrialState.WAITING, TrialState.PRUNED, TrialState.FAILED)
_PAINT = {
    TrialState.COMPLETE: "var(--accent)",
    TrialState.PRUNED: "var(--class-feature-map)",
    TrialState.FAILED: "var(--bad)",
    TrialState.WAITING: "var(--muted)",
}


def report(results: Results, title: str) -> str:
    """The page, as text; refuses a search without trials."""
    try:
        import optuna
        import plotly.offline
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"expected {error.name} for a report, got none: pip install 'trainmux[search]'"
        ) from None
    if not len(results):
        raise ConfigError("expected results with trials to report on, got none")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what a chart leaves out is no news
    try:
        sections = _sections(results)
    finally:
        optuna.logging.set_verbosity(verbosity)
    ordered = _ordered(results)
    columns, rows = _table(results, ordered)
    return search_page(
        title=title,
        lead=_lead(results),
        tiles=_tiles(results),
        sections=sections,
        columns=columns,
        rows=rows,
        has_best=len(results.metric) == 1 and bool(results.ranked()),
        plotly=plotly.offline.get_plotlyjs(),
    )


def _ordered(results: Results) -> list[Trial]:
    """Complete trials, best first; then the others by state."""
    ranked = results.ranked()
    left = [trial for trial in results if trial.state is not TrialState.COMPLETE or trial.values is None]
    order = {state: place for place, state in enumerate(_LEFT)}
    return [*ranked, *sorted(left, key=lambda trial: order.get(trial.state, -1))]


def _lead(results: Results) -> str:
    aims = {"min": "minimized", "max": "maximized"}
    metrics = [f"{name} is {aims[mode]}" for name, mode in zip(results.metric, results.mode, strict=True)]
    return f"{counted(len(results), 'trial')}; {', '.join(metrics)}."


def _tiles(results: Results) -> list[tuple[str, str, str]]:
    ranked = results.ranked()
    tiles = []
    if len(results.metric) > 1:
        front = results.pareto_front()
        tiles.append(
            ("Pareto front", counted(len(front), "trial"), "that no other one beats in every metric")
        )
    elif ranked:
        best = ranked[0]
        params = ", ".join(f"{key} {_text(value)}" for key, value in best.params.items())
        tiles.append(
            (f"Best {results.metric[0]}", _text(best.value), f"{best.name}: {params or 'no parameters'}")
        )
        values = [trial.value for trial in ranked if trial.value is not None]
        tiles.append(("Median", _text(sorted(values)[len(values) // 2]), "of the complete trials"))
    counts = Counter(trial.state for trial in results)
    others = ", ".join(f"{counts[state]} {state}" for state in _LEFT if counts[state])
    tiles.append(
        ("Complete", counted(counts[TrialState.COMPLETE], "trial"), others or "none pruned, none failed")
    )
    epochs = sum(trial.epoch for trial in results)
    ended = [trial.epoch for trial in results if trial.state is TrialState.PRUNED]
    saved = sum(trial.max_epochs - trial.epoch for trial in results if trial.state is TrialState.PRUNED)
    note = f"{saved:,} saved by pruning {counted(len(ended), 'trial')}" if ended else "of all trials"
    tiles.append(("Epochs", f"{epochs:,}", note))
    seconds = sum(trial.seconds for trial in results)
    tiles.append(("Time in slots", str(timedelta(seconds=round(seconds))), "of all trials together"))
    return tiles


# ---- charts ------------------------------------------------------------------------------------------


def _sections(results: Results) -> list[Section]:
    metrics = results.metric
    shown = [*metrics, *(["loss"] if "loss" not in metrics else [])]
    curves = [chart for metric in shown if (chart := _curves(results, metric)) is not None]
    sections = [
        Section("curves", "Curves", "The course of every trial, epoch by epoch.", curves)
        if curves
        else Section("curves", "Curves", "", [Chart("", note="No trial has finished an epoch.")])
    ]
    study, params = _study(results)
    if len(metrics) > 1:
        sections.append(_pareto(study, metrics))
    sections.append(_parallel(study, params, metrics))
    sections.append(_importance(study, params, metrics))
    return sections


def _curves(results: Results, metric: str) -> Chart | None:
    import plotly.graph_objects as go

    points = {trial.number: _points(trial, metric) for trial in results}
    points = {number: found for number, found in points.items() if found}
    if not points:
        return None
    ranked = results.ranked()
    best = ranked[0].number if ranked and len(results.metric) == 1 else None
    figure = go.Figure()
    trials = [trial for trial in results if trial.number in points]
    if len(trials) <= _FEW:
        for trial in trials:
            if trial.number != best:
                figure.add_trace(_line([trial], points, f"{trial.name} ({trial.state})"))
    else:
        for state, paint in _PAINT.items():
            some = [trial for trial in trials if trial.state is state and trial.number != best]
            if some:
                look = {"line": {"color": paint, "width": 1.2}, "legendgroup": str(state)}
                faint = max(0.2, min(0.7, 20 / len(some)))
                figure.add_trace(_line(some, points, "", opacity=faint, showlegend=False, **look))
                # In the legend the colour is not faint.
                figure.add_trace(
                    go.Scatter(x=[None], y=[None], mode="lines", name=f"{len(some)} {state}", **look)
                )
    if best is not None and best in points:
        line = {"color": "var(--good-ink)", "width": 3.5}
        figure.add_trace(_line([ranked[0]], points, f"best: {ranked[0].name}", line=line))
    values = [value for found in points.values() for _, value in found]
    is_log = min(values) > 0 and max(values) / min(values) > _LOG_RATIO
    figure.update_layout(
        height=420,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        hovermode="closest",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": "epoch", "rangemode": "tozero"},
        yaxis={"title": _shown(metric), **(_log_axis(values) if is_log else {})},
        template="none",
    )
    return Chart(metric, figure.to_json())


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with readable ticks: at 1, 2 and 5 times powers of ten, or at these alone."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low / 1.5 <= tick <= high * 1.5]
    if len(ticks) > _MOST_TICKS:
        ticks = [10.0**power for power in powers if power % (len(powers) // _MOST_TICKS + 1) == 0]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _points(trial: Trial, metric: str) -> list[tuple[int, float]]:
    """Epochs and values of a metric, where they are finite: of many, the last ones of equal parts."""
    found = []
    for record in trial.records:
        try:
            found.append((record.epoch, metric_of(record, metric)))
        except ConfigError:
            return []
    found = [point for point in found if math.isfinite(point[1])]
    count = len(found)
    if count <= _MOST_POINTS:
        return found
    return [found[(place + 1) * count // _MOST_POINTS - 1] for place in range(_MOST_POINTS)]


def _line(trials: Sequence[Trial], points: dict[int, list[tuple[int, float]]], name: str, **look: Any) -> Any:
    """One trace of the curves of some trials, with gaps between them."""
    import plotly.graph_objects as go

    xs: list[int | None] = []
    ys: list[float | None] = []
    texts: list[str] = []
    for trial in trials:
        found = points[trial.number]
        xs += [*(epoch for epoch, _ in found), None]
        ys += [*(value for _, value in found), None]
        texts += [_shown(trial.name)] * (len(found) + 1)
    is_dot = all(len(points[trial.number]) == 1 for trial in trials)
    return go.Scatter(
        x=xs,
        y=ys,
        text=texts,
        name=_shown(name),
        mode="markers" if is_dot else "lines",
        hovertemplate="%{text}<br>epoch %{x}: %{y:.5g}<extra></extra>",
        **look,
    )


def _parallel(study: optuna.Study, params: Sequence[str], metrics: Sequence[str]) -> Section:
    import optuna.visualization as charts

    def draw(metric: str, target: Callable[[Any], float]) -> Any:
        figure = charts.plot_parallel_coordinate(study, target=target, target_name=_shown(metric))
        return figure.update_layout(title=None, height=420, margin={"l": 80, "r": 40, "t": 30, "b": 40})

    help_text = "A line per complete trial, through its value and its parameters; the best are the strongest."
    drawn = [_drawn(study, params, metric, place, 2, draw) for place, metric in enumerate(metrics)]
    return Section("parameters", "Parameters", help_text, drawn)


def _importance(study: optuna.Study, params: Sequence[str], metrics: Sequence[str]) -> Section:
    import optuna.visualization as charts

    def draw(metric: str, target: Callable[[Any], float]) -> Any:
        figure = charts.plot_param_importances(study, target=target, target_name=_shown(metric))
        figure.update_traces(marker_color="var(--accent)")
        figure.update_xaxes(title=None)
        figure.update_yaxes(title=None, automargin=True)
        height = 60 + 36 * len(params)
        margin = {"l": 100, "r": 40, "t": 10, "b": 40}
        return figure.update_layout(title=None, height=height, margin=margin, showlegend=False)

    help_text = "How much of the spread of the values each parameter explains, by Optuna's estimate."
    drawn = [_drawn(study, params, metric, place, 4, draw) for place, metric in enumerate(metrics)]
    return Section("importance", "Importance of the parameters", help_text, drawn)


def _pareto(study: optuna.Study, metrics: Sequence[str]) -> Section:
    import optuna.visualization as charts

    def draw(metric: str, target: Callable[[Any], float]) -> Any:
        figure = charts.plot_pareto_front(study, target_names=list(map(_shown, metrics)))
        looks = (("others", "var(--muted)", 6), ("Pareto front", "var(--good-ink)", 10))
        for trace, (name, paint, size) in zip(figure.data, looks, strict=True):
            marker = {"color": paint, "size": size, "showscale": False, "line": {"width": 0}}
            trace.update(marker=marker, name=name, showlegend=True)
        return figure.update_layout(title=None, height=480, margin={"l": 60, "r": 20, "t": 20, "b": 50})

    help_text = "The complete trials by their values, those on the Pareto front apart."
    if len(metrics) > 3:
        note = f"Drawn for two or three metrics; here are {len(metrics)}."
        return Section("pareto", "Pareto front", help_text, [Chart("", note=note)])
    return Section("pareto", "Pareto front", help_text, [_drawn(study, metrics, "", 0, 2, draw)])


def _drawn(
    study: optuna.Study,
    params: Sequence[str],
    metric: str,
    place: int,
    fewest: int,
    draw: Callable[[str, Callable[[Any], float]], Any],
) -> Chart:
    """A chart of Optuna's, or why there is none."""
    import optuna

    complete = optuna.trial.TrialState.COMPLETE
    num_trials = len(study.get_trials(deepcopy=False, states=(complete,)))
    if num_trials < fewest:
        return Chart(
            metric, note=f"Needs {fewest} complete trials or more with finite values; got {num_trials}."
        )
    if not params:
        return Chart(metric, note="The trials have no parameters that differ: give Candidate its params=.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figure = draw(metric, lambda trial: float(trial.values[place]))
    except (ValueError, RuntimeError) as error:
        return Chart(metric, note=f"Cannot be drawn: {first_line(error)}")
    figure.update_layout(template="none")
    return Chart(metric, figure.to_json())


def _study(results: Results) -> tuple[optuna.Study, list[str]]:
    """The complete trials as a study of Optuna's in memory, and the parameters that differ among them."""
    import optuna

    aims = {"min": "minimize", "max": "maximize"}
    study = optuna.create_study(directions=[aims[mode] for mode in results.mode])
    trials = [trial for trial in results.ranked() if all(map(math.isfinite, trial.values or (math.nan,)))]
    values: dict[str, list[Any]] = {}
    for trial in trials:
        for key, value in trial.params.items():
            values.setdefault(str(key), []).append(value)
    kinds = {key: _distribution(found) for key, found in values.items() if len(set(map(repr, found))) > 1}
    by_number = {trial.number: trial for trial in trials}
    for number in range(max(by_number, default=-1) + 1):
        if number not in by_number:  # so that the others have their own numbers
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
            continue
        params = {str(key): value for key, value in by_number[number].params.items() if str(key) in kinds}
        study.add_trial(
            optuna.trial.create_trial(
                values=list(by_number[number].values or ()),
                params={
                    _shown(key): _choice(value) if _is_choice(kinds[key]) else value
                    for key, value in params.items()
                },
                distributions={_shown(key): kinds[key] for key in params},
            )
        )
    return study, list(kinds)


def _distribution(values: Sequence[Any]) -> optuna.distributions.BaseDistribution:
    """A distribution that holds some values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    choices = list(dict.fromkeys(map(_choice, values)))
    if all(map(_is_number, values)) and all(map(math.isfinite, values)):
        if len(choices) > _MOST_CHOICES or not all(isinstance(value, int) for value in values):
            ordered = sorted(map(float, values))
            return FloatDistribution(ordered[0], ordered[-1], log=_is_logarithmic(ordered))
        choices.sort()
    return CategoricalDistribution(choices)


def _choice(value: Any) -> Any:
    """A value among those of a parameter that is no range."""
    return value if isinstance(value, bool | int) else _shown(_text(value))


def _is_logarithmic(values: Sequence[float]) -> bool:
    """Whether values in order seem drawn from a logarithmic range: is their median near its middle?"""
    low, median, high = values[0], values[len(values) // 2], values[-1]
    if low <= 0 or high / low <= _LOG_RATIO:
        return False
    place = (median - low) / (high - low)
    log_place = math.log(median / low) / math.log(high / low)
    return abs(log_place - 0.5) < abs(place - 0.5)


def _is_choice(kind: Any) -> bool:
    return hasattr(kind, "choices")


# ---- table -------------------------------------------------------------------------------------------


def _table(results: Results, ordered: Sequence[Trial]) -> tuple[dict[str, str], list[list[Cell]]]:
    """Columns and rows; parameters under their names, or with a prefix where these are taken."""
    num_ranked = len(results.ranked())
    keys = list(dict.fromkeys(key for trial in results for key in trial.params))
    columns = {"Rank": NUMBER, "Trial": SHORT, "State": f"{SHORT} state"}
    columns |= dict.fromkeys(results.metric, NUMBER)
    headed = {key: str(key) if str(key) not in columns else f"params_{key}" for key in keys}
    for key in keys:
        some = [trial.params[key] for trial in results if key in trial.params]
        columns[headed[key]] = NUMBER if all(map(_is_number, some)) else SHORT
    columns |= {"Epochs": NUMBER, "Seconds": NUMBER, "Number": NUMBER}
    has_errors = any(trial.error for trial in results)
    columns |= {"Error": TEXT} if has_errors else {}
    rows = []
    for place, trial in enumerate(ordered):
        rank: Cell = (str(place + 1), place + 1) if place < num_ranked else ("", math.inf)
        row: list[Cell] = [rank, (trial.name, trial.name), (str(trial.state), str(trial.state))]
        values = trial.values or (math.nan,) * len(results.metric)
        row += [_cell(value) for value in values]
        row += [_cell(trial.params[key]) if key in trial.params else ("", "") for key in keys]
        row += [_cell(trial.epoch), (f"{trial.seconds:.1f}", trial.seconds), _cell(trial.number)]
        row += [(trial.error or "", trial.error or "")] if has_errors else []
        rows.append(row)
    return columns, rows


def _cell(value: Any) -> Cell:
    if _is_number(value):
        return (_text(value) if math.isfinite(value) else "-" if math.isnan(value) else str(value), value)
    return _text(value), _text(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """A value as people read it."""
    return value_text(value) if isinstance(value, float) else str(value)


def _shown(text: str) -> str:
    """A text as a label of Plotly's, which would take some of HTML's tags for styles."""
    return text.replace("<", "‹").replace(">", "›")
