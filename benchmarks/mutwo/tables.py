"""The tables of docs/mutwo.md, from a document of results and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.records import name_of

from .cells import (
    ACTIVATION_BUDGET,
    ALL,
    BERT,
    DLRM,
    FIGURES,
    GPT2,
    HFTA,
    MPS,
    PAPER_SIZES,
    SAVE_ON_CPU,
    VIT,
    Cell,
    Sizes,
    Subject,
)

GIB = 1 << 30
HOURS_PER_MS_OF_10K = 10_000 / 3.6e6
NAMES = {
    BERT: "BERT-base",
    VIT: "ViT-60M",
    GPT2: "GPT-2",
    "resnet101": "ResNet-101",
    "mobilenet_v3_large": "MobileNetV3-Large",
    DLRM: "DLRM",
}
PAPER_PARAMETERS = {
    BERT: "100M",
    VIT: "60M",
    GPT2: "124M",
    "resnet101": "44.5M",
    "mobilenet_v3_large": "5.4M",
    DLRM: "40M",
}
PLANNED = ("capuchin", "mutwo", "auto")
TITLES = {HFTA: "HFTA", "capuchin": "HFTA-Capuchin", "mutwo": "`mutwo`", "auto": "`auto`"}

Row = Mapping[str, Any]
Table = list[dict[str, str]]


class Found:
    """A document of results by what its rows are named; those with an error are apart."""

    def __init__(self, document: Mapping[str, Any], sizes: Sizes = PAPER_SIZES) -> None:
        self.runs: Sequence[Row] = document["runs"]
        self.sizes = sizes
        self._rows = {name_of("mutwo", row): row for row in document["rows"]}

    def any_row(self, cell: Cell) -> Row | None:
        return self._rows.get(name_of("mutwo", cell.key))

    def row(self, cell: Cell) -> Row | None:
        """What was measured, ``None`` where nothing was or it failed."""
        row = self.any_row(cell)
        return None if row is None or "error" in row else row

    def cell(self, subject: Subject, members: int, way: str, budget: str = "", **other: Any) -> Cell:
        """A cell of Figure 8, or of an experiment, batch size or optimizer apart from it."""
        batch_size = other.get("batch_size", subject.batch_sizes[0])
        experiment, optimizer = other.get("experiment", "step"), other.get("optimizer", "sgd")
        budget = budget or self.sizes.budget
        return Cell(experiment, subject.workload, batch_size, optimizer, members, budget, way)

    def step(self, subject: Subject, members: int, way: str, budget: str = "", **other: Any) -> Row | None:
        return self.row(self.cell(subject, members, way, budget, **other))

    def times(self, cell: Cell, base: Row | None) -> str:
        """How many times faster a cell is than ``base``, or why nobody can tell."""
        row = self.any_row(cell)
        if row is None or base is None:
            return "–"
        if "error" in row:
            return "no plan fits" if row["error"].startswith("BudgetError") else "failed"
        return f"{base['step_ms'] / row['step_ms']:.2f}×"

    def compared(self) -> Iterator[tuple[str, Subject, int, int, str]]:
        """Name, workload, batch size, number of models and budget of every point of Figure 8."""
        for subject in self.sizes.subjects:
            for batch_size in subject.batch_sizes if subject.both else subject.batch_sizes[:1]:
                for members in dict.fromkeys(subject.counts):
                    yield named(subject), subject, batch_size, members, self.sizes.budget
        by_name = {subject.workload: subject for subject in self.sizes.subjects}
        for workload, batch_size in self.sizes.v100:
            for members in dict.fromkeys(by_name[workload].counts):
                yield named(by_name[workload]), by_name[workload], batch_size, members, self.sizes.v100_budget

    def speedups(
        self, way: str, over: str = HFTA, place: int = 2, optimizer: str = "sgd"
    ) -> dict[str, float]:
        """By workload, how many times faster ``way`` is at one of its numbers of models."""
        found = {}
        for subject in self.sizes.subjects:
            members = subject.counts[place]
            row = self.step(subject, members, way, optimizer=optimizer)
            base = self.step(subject, members, over, optimizer=optimizer)
            if row and base:
                found[named(subject)] = base["step_ms"] / row["step_ms"]
        return found


def named(subject: Subject) -> str:
    return NAMES.get(subject.workload, subject.workload)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else f"{value:.0f}" if form == ".3g" and value >= 100 else f"{value:{form}}"


def _ms(row: Row | None) -> str:
    return number(row["step_ms"] if row else None)


def _subsets(row: Row | None) -> str:
    """Widths of HFTA's subsets, with how many there are of each."""
    counts: Counter[int] = Counter(row["subsets"] if row else [])
    return " + ".join(f"{count} × {width}" for width, count in counts.items()) or "–"


def _gib(value: float | None) -> str:
    return number(None if value is None else value / GIB)


# ---- the paper's tables and figures ----------------------------------------------------------------------


def table_1(found: Found) -> Table:
    rows = []
    for subject in found.sizes.subjects:
        measured = (found.step(subject, members, way) for members in subject.counts for way in PLANNED)
        row = next((row for row in measured if row), None)
        if row:
            paper = PAPER_PARAMETERS.get(subject.workload, "–")
            here = f"{row['num_parameters'] / 1e6:.1f}M"
            sizes = " and ".join(map(str, subject.batch_sizes))
            model = {"model": named(subject), "parameters in the paper": paper, "here": here}
            rows.append({**model, "batch sizes, both": sizes})
    return rows


def table_c(found: Found) -> Table:
    """The paper's two machines, and those that measured."""
    rows = [
        {"machine": "AWS p4d.24xlarge (paper)", "GPU": "A100, 40 GB", "link": "32 GB/s"},
        {"machine": "Dell DSS 8440 (paper)", "GPU": "V100, 32 GB", "link": "32 GB/s"},
    ]
    here = dict.fromkeys(f"{run['device']}, torch {run['torch']}" for run in found.runs)
    budgets = f"budgets of {found.sizes.budget}, {found.sizes.v100_budget} and {found.sizes.small_budget}"
    return [*rows, *({"machine": "here", "GPU": each, "link": budgets} for each in here)] if here else []


def figure_3(found: Found) -> Table:
    """Figure 3c: bytes that four fused models need."""
    rows = []
    for subject in found.sizes.subjects:
        needs = [
            found.step(subject, 4, HFTA, ALL, batch_size=batch_size) for batch_size in subject.batch_sizes
        ]
        if any(needs):
            sizes = [
                f"{_gib(row['peak_bytes'] if row else None)} (batch {batch_size})"
                for batch_size, row in zip(subject.batch_sizes, needs, strict=True)
            ]
            rows.append({"four fused models": named(subject), "peak by HFTA, GiB": ", ".join(sizes)})
    return rows


def figure_7(found: Found) -> Table:
    """Hours for 10,000 iterations of all models, by throughput; and iterations that were really run."""
    rows = []
    for subject in found.sizes.subjects:
        for members in dict.fromkeys(subject.counts) if subject.both else ():
            hfta, auto = (found.step(subject, members, way) for way in (HFTA, "auto"))
            if not hfta or not auto:
                continue
            hours = [HOURS_PER_MS_OF_10K * row["step_ms"] for row in (hfta, auto)]
            ran = [found.step(subject, members, way, experiment="run") for way in (HFTA, "auto")]
            really = " and ".join(f"{row['run_s']:.0f}" for row in ran if row)
            model = {"models": f"{members} × {named(subject)}", "HFTA, hours": number(hours[0])}
            model |= {"`auto`, hours": number(hours[1]), "saved, hours": number(hours[0] - hours[1])}
            rows.append({**model, f"{found.sizes.real} really run, s": really or "–"})
    return rows


def figure_8(found: Found) -> Table:
    rows = []
    for name, subject, batch_size, members, budget in found.compared():
        cells = [found.cell(subject, members, way, budget, batch_size=batch_size) for way in (HFTA, *PLANNED)]
        if sum(found.row(cell) is not None for cell in cells) < 2:
            continue
        hfta = found.row(cells[0])
        row = {"models": f"{members} × {name}, batch {batch_size}", "budget": budget}
        row |= {"HFTA's subsets": _subsets(hfta), "HFTA, ms": _ms(hfta)}
        rows.append(row | {TITLES[cell.way]: found.times(cell, hfta) for cell in cells[1:]})
    for place, said in enumerate(("the fewest models", "twice as many", "the most")):
        means = {way: list(found.speedups(way, place=place).values()) for way in PLANNED}
        if rows and all(means.values()):
            shown = {TITLES[way]: f"{geometric_mean(each):.2f}× ({len(each)})" for way, each in means.items()}
            about = {"models": f"geometric mean, {said}", "budget": found.sizes.budget}
            rows.append({**about, "HFTA's subsets": "", "HFTA, ms": "", **shown})
    return rows


def figure_9(found: Found) -> Table:
    """Of BERT and ViT: latency, recompute share, swap overlap, and by how much the peak passes the limit."""
    rows = []
    for name, subject, batch_size, members, budget in found.compared():
        if not subject.both or batch_size != subject.batch_sizes[0] or budget != found.sizes.budget:
            continue
        hfta = found.step(subject, members, HFTA)
        for way in PLANNED:
            if row := found.step(subject, members, way):
                recompute = row.get("watched_recompute_ms")
                useful = None if recompute is None else row["watched_compute_ms"] - recompute
                about = {"models": f"{members} × {name}", "policy": TITLES[way], "HFTA, ms": _ms(hfta)}
                about |= {"iteration, ms": _ms(row), "useful compute, ms": number(useful)}
                about |= {"recompute, ms": number(recompute)}
                about |= {"recompute share": number(row["recompute_share"], ".1%")}
                about |= {
                    "swaps hidden": number(row["swap_overlap"], ".0%") if row["num_swaps"] else "no swaps"
                }
                over = max(0.0, row["plain_peak_bytes"] / row["budget_bytes"] - 1)
                rows.append({**about, "peak over limit": number(over, ".0%")})
    return rows


def table_d(found: Found) -> Table:
    """Table D and "3-5× more models": what fits at once, and what trains within the same bytes."""
    rows = []
    for subject in found.sizes.subjects:
        bases = [row for members in subject.counts if (row := found.step(subject, members, HFTA))]
        ours = [members for members in subject.counts if found.step(subject, members, "auto")]
        if bases and ours:
            most, base = max(ours), bases[-1]
            row = found.step(subject, most, "auto")
            assert row is not None
            widest = max(base["subsets"])
            about = {"model": named(subject), "at once by HFTA": str(widest), "by `auto`": str(most)}
            about |= {"times as many": f"{most / widest:.1f}×"}
            about |= {"HFTA, ms a model": number(base["step_ms"] / base["members"])}
            about |= {"`auto`, ms a model": number(row["step_ms"] / most)}
            used = [row.get("device_bytes"), row["budget_bytes"]]
            rows.append({**about, "of the budget used": number(used[0] and used[0] / used[1], ".0%")})
    return rows


def table_e(found: Found) -> Table:
    """Iteration, recompute share and stall share of every policy on our own engine."""
    ways = ("none", "swap_only", "recompute_only", "capuchin", "mutwo_turns", "mutwo", "auto")
    rows = []
    for subject in found.sizes.subjects:
        measured = {way: found.step(subject, subject.counts[2], way) for way in ways}
        if sum(map(bool, measured.values())) < 2:
            continue
        row = {"models": f"{subject.counts[2]} × {named(subject)}"}
        for way, each in measured.items():
            if each:
                shares = f"{each['recompute_share']:.0%}, {each['stall_ms'] / each['predicted_ms']:.0%}"
                row[f"`{way}`"] = f"{_ms(each)} ({shares})"
            else:
                row[f"`{way}`"] = found.times(found.cell(subject, subject.counts[2], way), {})
        rows.append(row)
    return rows


def overhead(found: Found) -> Table:
    """§5.4: seconds for profiles and for the search, of the first plan of each fleet and the others."""
    rows = []
    for name, subject, batch_size, members, budget in found.compared():
        row = {"models": f"{members} × {name}, batch {batch_size}"}
        for way in PLANNED:
            each = found.step(subject, members, way, budget, batch_size=batch_size)
            if each:
                search = each["planning_s"] - each["profiling_s"]
                row[f"{TITLES[way]}, s"] = f"{each['profiling_s']:.1f} + {search:.1f}"
        if len(row) == 1 + len(PLANNED) and budget == found.sizes.budget:
            rows.append(row)
    return rows


# ---- beyond the paper ------------------------------------------------------------------------------------


def adamw(found: Found) -> Table:
    rows = []
    for subject in found.sizes.subjects:
        members = subject.counts[1]
        hfta, auto = (found.step(subject, members, way, optimizer="adamw") for way in (HFTA, "auto"))
        if hfta and auto:
            row = {
                "models": f"{members} × {named(subject)}",
                "HFTA's subsets": _subsets(hfta),
            }
            rows.append(
                {
                    **row,
                    "HFTA, ms": _ms(hfta),
                    "`auto`, ms": _ms(auto),
                    "faster": f"{hfta['step_ms'] / auto['step_ms']:.2f}×",
                }
            )
    return rows


def others(found: Found) -> Table:
    titles = {HFTA: "HFTA", SAVE_ON_CPU: "`save_on_cpu`", ACTIVATION_BUDGET: "`activation_memory_budget`"}
    titles |= {MPS: "MPS", "auto": "`auto`"}
    rows = []
    for subject in found.sizes.subjects:
        measured = {way: found.step(subject, subject.counts[1], way) for way in titles}
        if any(measured[way] for way in (SAVE_ON_CPU, ACTIVATION_BUDGET, MPS)):
            shown = {titles[way]: _ms(row) for way, row in measured.items()}
            if row := measured[ACTIVATION_BUDGET]:
                shown[titles[ACTIVATION_BUDGET]] += f" (keeps {row['kept_share']:.0%})"
            if row := measured[MPS]:
                shown["MPS"] += f" ({row['at_once']} at once)"
            rows.append({"models": f"{subject.counts[1]} × {named(subject)}", **shown})
    return rows


def footprint(found: Found) -> Table:
    """A footprint of six times the budget: what it costs over all the memory there is."""
    rows = []
    for subject in found.sizes.subjects:
        members, batch_size = subject.counts[1], subject.batch_sizes[0]
        whole = found.step(subject, members, "none", ALL)
        tight = found.any_row(Cell("step", subject.workload, batch_size, "sgd", members, "1/6", "auto"))
        if whole and tight:
            row = {
                "models": f"{members} × {named(subject)}",
                "all needs, GiB": _gib(whole["predicted_bytes"]),
            }
            row |= {"budget, GiB": _gib(whole["predicted_bytes"] / 6), "with all memory, ms": _ms(whole)}
            if "error" in tight:
                rows.append({**row, "in the budget, ms": "refused: too small", "costs": "–"})
            else:
                costs = f"{tight['step_ms'] / whole['step_ms']:.2f}×"
                rows.append({**row, "in the budget, ms": _ms(tight), "costs": costs})
    return rows


def many(found: Found) -> Table:
    subject = found.sizes.subjects[0]
    rows = []
    few = (subject.counts[0] // 2, ALL)
    for members, budget in (few, *((each, found.sizes.small_budget) for each in found.sizes.many)):
        if row := found.step(subject, members, "auto", budget, optimizer="adamw"):
            about = {"models": f"{members} × {named(subject)}, AdamW", "budget": budget}
            about |= {"of the device, GiB": _gib(row.get("device_bytes"))}
            about |= {"of the host for swaps, GiB": _gib(row["host_bytes"]), "iteration, ms": _ms(row)}
            rows.append({**about, "ms a model": number(row["step_ms"] / members)})
    return rows


def convergence(found: Found) -> Table:
    rows = []
    for row in convergence_rows(found):
        last = row["accuracy"][-1]
        shown = ", ".join(f"{each:.2%}" for each in last)
        rates = ", ".join(f"{rate:g}" for rate in row["rates"])
        about = {"way": row["way"], f"accuracy at {row['steps'][-1]} steps, rates {rates}": shown}
        rows.append({**about, "seconds": f"{row['seconds']:.0f}"})
    return rows


def convergence_rows(found: Found) -> list[Row]:
    return [row for _, cell in FIGURES["convergence"](found.sizes) if (row := found.row(cell))]


def missing(found: Found) -> Table:
    """Per figure how many of its cells were measured, failed, and are missing."""
    rows = []
    for name in FIGURES:
        cells = dict.fromkeys(cell for _, cell in FIGURES[name](found.sizes))
        known = [row for cell in cells if (row := found.any_row(cell)) is not None]
        failed = sum("error" in row for row in known)
        counts = {"measured": len(known) - failed, "failed": failed, "missing": len(cells) - len(known)}
        rows.append({"figure": f"`{name}`", **{said: str(count) for said, count in counts.items()}})
    return rows


TABLES: dict[str, Callable[[Found], Table]] = {
    "table_1": table_1,
    "table_c": table_c,
    "figure_3": figure_3,
    "figure_7": figure_7,
    "figure_8": figure_8,
    "figure_9": figure_9,
    "table_d": table_d,
    "table_e": table_e,
    "overhead": overhead,
    "adamw": adamw,
    "others": others,
    "footprint": footprint,
    "many": many,
    "convergence": convergence,
    "missing": missing,
}
