"""Results of `bench zico` → the figures and tables of the paper, each with the paper's claim beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .tables import number
from .zico_alone import REGIONS_ON_A_CPU, TRACKING
from .zico_cases import PAPER_NAMES, base_name, machine_bytes
from .zico_draw import Bar, Curve, Mark, bars, curves
from .zico_pair_figures import figure_5, figure_7, figure_8, figure_9, figure_10
from .zico_results import GIB, MIB, Figure, Results, pair_name

_TABLE_1 = {
    "All": (78, 91, 97, 44, 94, 97),
    "Fine-grained": (100, 100, 100, 89, 99, 99),
    "Coarse-grained": (100, 100, 100, 97, 99, 100),
}
_TABLE_2 = {"Tensor": (94, 99, 98, 90, 96, 94), "Small region": (94, 99, 100, 97, 99, 99)}


def figures(results: Results) -> list[Figure]:
    """All of them, in the paper's order."""
    return [
        _figure_1(results),
        _figure_2(results),
        _figure_3(results),
        figure_5(results),
        _figure_6(results),
        figure_7(results),
        figure_8(results),
        figure_9(results),
        figure_10(results),
        _table_1(results),
        _table_2(results),
        _decisions(results),
    ]


def _figure_1(results: Results) -> Figure:
    name, title = "Figure 1", "Cumulative distribution of NASNet tensor lifespan"
    claim = (
        "Feature maps live 134 ms on average, 234 ms in the median; other data 18 ms and 2 ms. "
        "Feature maps are the larger tensors."
    )
    found = results.memory_of("nasnet")
    if found is None:
        return Figure(name, title, claim, left_out=results.why_not(["nasnet"], "the memory"))
    case, record = found
    rows, table = [], [("", "tensors", "MiB", "mean ms", "median ms", "median KiB a tensor", "paper")]
    paper = {"feature maps": "134 ms mean, 234 ms median", "others": "18 ms mean, 2 ms median"}
    for what, row in record["lifespans"].items():
        ordered, sizes = row["quantiles_seconds"], row["size_quantiles_bytes"]
        if not ordered:
            continue
        rows.append(
            Curve(what, [(1e3 * value, place / (len(ordered) - 1)) for place, value in enumerate(ordered)])
        )
        table.append(
            (
                what,
                str(row["count"]),
                number(row["bytes"] / MIB),
                number(1e3 * row["mean_seconds"]),
                number(1e3 * row["median_seconds"]),
                number(sizes[len(sizes) // 2] / 1024),
                paper[what],
            )
        )
    picture = curves(f"{case}: lifespans of tensors", "milliseconds", "share of tensors", rows)
    return Figure(name, title, claim, results.kernels_on(record), {"figure_1": picture}, table)


def _figure_2(results: Results) -> Figure:
    name, title = "Figure 2", "Memory usage patterns for different DNN models over time"
    claim = (
        "Every model has a peak far above the least, which is the model itself. ResNet-50 is beefy: near its "
        "peak for long. GNMT is lean: near its peak for a short time."
    )
    if not results.memory:
        return Figure(name, title, claim, left_out=results.why_not(list(PAPER_NAMES), "the memory"))
    table = [("job", "iteration ms", "least MiB", "peak MiB", "peak over least", "time above half the peak")]
    rows = []
    for case, record in results.memory.items():
        seconds, peak = record["seconds"], record["peak_bytes"]
        curve = record["curve"]
        rows.append(Curve(case, [(moment / seconds, size / peak) for moment, size in curve], is_stepped=True))
        above = sum(after[0] - here[0] for here, after in itertools.pairwise(curve) if here[1] > peak / 2)
        table.append(
            (
                case,
                number(1e3 * seconds),
                number(record["lowest_bytes"] / MIB),
                number(peak / MIB),
                f"{peak / record['lowest_bytes']:.1f}",
                f"{above / seconds:.0%}",
            )
        )
    picture = curves("Memory over one iteration", "part of the iteration", "part of the peak", rows)
    first = next(iter(results.memory.values()))
    return Figure(name, title, claim, results.kernels_on(first), {"figure_2": picture}, table)


def _figure_3(results: Results) -> Figure:
    name, title = "Figure 3", "GPU memory usage from CPU view (ResNet-50)"
    claim = "The host sees a cycle that is over soon, then a long pause while kernels are pending on the GPU."
    seen: Mapping[str, Any] = results.document["host_view"]
    if not seen:
        return Figure(name, title, claim, left_out=results.why_not(["resnet50"], "the host's view"))
    case, record = next(iter(seen.items()))
    points = [(1e3 * moment, size / MIB) for moment, size in record["samples"]]
    marks = [Mark("issued", 1e3 * moment, is_vertical=True) for moment in record["issued"]]
    marks += [Mark("done", 1e3 * moment, is_vertical=True) for moment in record["ended"]]
    picture = curves(
        f"{case} in plain torch, as the host sees it",
        "milliseconds",
        "MiB",
        [Curve("allocated", points)],
        marks,
    )
    table = [("iteration", "issued after ms", "done after ms", "pause")]
    begin = 0.0
    for place, (issued, ended) in enumerate(zip(record["issued"], record["ended"], strict=True)):
        share = (ended - issued) / (ended - begin)
        table.append((str(place + 1), number(1e3 * issued), number(1e3 * ended), f"{share:.0%}"))
        begin = ended
    produced = f"{results.device}; torch's allocator, looked at from a thread while plain torch trains"
    return Figure(name, title, claim, produced, {"figure_3": picture}, table)


def _figure_6(results: Results) -> Figure:
    name, title = "Figure 6", "Aggregated memory usage for training the same models"
    claim = "Two equal jobs exceed the card at the larger batch sizes, RHN at all of them (red bars)."
    if not results.memory:
        return Figure(name, title, claim, left_out=results.why_not(list(PAPER_NAMES), "the memory"))
    groups, table = [], [("job, twice", "GiB", "machine GiB", "exceeds it")]
    for case, record in results.memory.items():
        both, room = 2 * record["peak_bytes"], machine_bytes([case])
        is_over = both > room
        groups.append((case, [Bar(f"of {room / GIB:.0f} GiB", both / GIB, is_over=is_over)]))
        table.append((case, number(both / GIB), f"{room / GIB:.0f}", "yes" if is_over else "no"))
    first = next(iter(results.memory.values()))
    notes = ["Batch sizes are ours, for an H200: see the list of jobs. The paper's are only on its axes."]
    return Figure(
        name,
        title,
        claim,
        results.kernels_on(first),
        {"figure_6": bars("Memory of two equal jobs at their peaks", groups, unit=" GiB")},
        table,
        notes,
    )


def _table_1(results: Results) -> Figure:
    name, title = "Table 1", "Throughput with memory tracking"
    claim = "Tracking every kernel costs up to 56% (GNMT), every 8 MB up to 11%, every 256 MB up to 3%."
    rows = {case: row for case, row in results.document["tracking"].items() if row}
    if not rows:
        return Figure(name, title, claim, left_out=results.why_not(list(PAPER_NAMES), "tracking"))
    produced = f"{results.device}; a job alone, cut into segments, over its whole step without any"
    return Figure(name, title, claim, produced, table=_shares(rows, list(TRACKING), _TABLE_1, 1.0))


def _table_2(results: Results) -> Figure:
    name, title = "Table 2", "Throughput with different sharing granularity"
    claim = "Against regions of 64 MB, regions of 512 KB cost up to 6%, single tensors up to 10%."
    rows = {case: row for case, row in results.document["regions"].items() if "64 MB" in row}
    if not rows:
        return Figure(name, title, claim, left_out=results.why_not(list(PAPER_NAMES), "sharing"))
    produced = f"{results.device}; two jobs of a model, whose peaks exceed the budget 1.3 times"
    labels = [label for label in REGIONS_ON_A_CPU if label != "64 MB"]
    notes = [
        "A CUDA device maps memory in pieces of 2 MiB: there, that is the small region, and single tensors "
        "are not to be had."
    ]
    return Figure(name, title, claim, produced, table=_shares(rows, labels, _TABLE_2, "64 MB"), notes=notes)


def _decisions(results: Results) -> Figure:
    name, title = "§7.4", "What a scheduling decision takes"
    claim = "A few hundred nanoseconds (in TensorFlow's C++)."
    rows = results.simulated_pairs()
    if not rows:
        return Figure(name, title, claim, left_out="no pair was simulated in this run")
    table = [("pair", "answer", "median µs", "95th percentile µs")]
    for row in rows:
        for what, (middle, high) in row["decision_us"].items():
            table.append((pair_name(row["names"]), what, number(middle), number(high)))
    produced = "this machine's host, in Python, while a simulated GPU was driven at the tightest budget"
    return Figure(name, title, claim, produced, table=table)


def _shares(
    rows: Mapping[str, Mapping[str, float]],
    labels: Sequence[str],
    paper: Mapping[str, Sequence[int]],
    base: float | str,
) -> list[tuple[str, ...]]:
    """A row per granularity, a column per job, the paper's share in brackets."""
    models = list(PAPER_NAMES)
    table = [("", *rows)]
    for label in labels:
        cells = []
        for case, row in rows.items():
            unit = row[base] if isinstance(base, str) else base
            own = f"{row[label] / unit:.0%}" if label in row else "–"
            model = base_name(case)
            said = f" ({paper[label][models.index(model)]}%)" if model in models else ""
            cells.append(own + said)
        table.append((f"{label} (paper)", *cells))
    return table
