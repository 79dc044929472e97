"""``python -m benchmarks claims``: the table that opens docs/papers.md, from committed results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from .cases import PAPER
from .mutwo.cells import BERT, VIT
from .mutwo.tables import Found, convergence_rows, geometric_mean, table_d
from .pages import fill, markdown

RESULTS = Path(__file__).parent / "results"
GPT2_BY_8 = {"workload": "gpt2_no_dropout", "batch_size": 8, "width": 8}


class Evidence:
    """The committed results; a file that is not there has no rows."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder

    def document(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        if not path.exists():
            return {"runs": [], "rows": []}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    @cached_property
    def mutwo(self) -> Found:
        return Found(self.document("mutwo_h200.json"))

    @cached_property
    def zico(self) -> Any:
        """Gains of pairs by what they may take, as a frame; ``None`` where none were measured."""
        from .zico.tables import gains

        document = self.document("zico_h200.json")
        return gains(document) if document["rows"] else None

    @cached_property
    def memory(self) -> Mapping[str, Any]:
        """Zico's Figures 1 and 2: one job's memory by name."""
        from .zico.tables import iterations

        return iterations(self.document("zico_h200.json"))

    @cached_property
    def step(self) -> Sequence[Mapping[str, Any]]:
        return self._rows("step_h200.json")

    @cached_property
    def plans(self) -> Sequence[Mapping[str, Any]]:
        return self._rows("plans_h200.json")

    def _rows(self, name: str) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.document(name)["rows"]
        return found

    def plan(self, **names: Any) -> Mapping[str, Any] | None:
        """A row of plans_h200.json that was measured."""
        for row in self.plans:
            if all(row.get(name) == value for name, value in names.items()) and "step_ms" in row:
                return row
        return None

    def over(self, way: str, base: str) -> list[float]:
        """How many times faster one way is than another, for every eight models that both trained."""
        ms: dict[str, dict[str, float]] = {}
        for row in self.step:
            if row["width"] == 8 and "median_ms" in row:
                ms.setdefault(row["workload"], {})[row["way"]] = row["median_ms"]
        return [row[base] / row[way] for row in ms.values() if {way, base} <= row.keys()]


@dataclass(frozen=True)
class Claim:
    """``measured`` gives our number as text, ``None`` where nothing was measured."""

    paper: str
    claim: str
    said: str
    measured: Callable[[Evidence], str | None]
    subject: str
    why: str


def _over_hfta(evidence: Evidence, base: str) -> str | None:
    found = evidence.mutwo.speedups("auto", over=base)
    return _mean(list(found.values())) if found else None


def _mean(values: Sequence[float]) -> str:
    """Geometric mean and range over the paper's workloads, as far as they are measured."""
    if not values:
        return "–"
    spread = f"{_range(values, '.2f')}, " if len(values) > 1 else ""
    return f"{geometric_mean(values):.2f}× ({spread}{_share_of_workloads(len(values))})"


def _share_of_workloads(num_measured: int, num_all: int = len(PAPER)) -> str:
    return f"{num_measured} of {num_all} workloads"


def _range(values: Sequence[float], form: str, unit: str = "") -> str:
    low, high = (f"{each:{form}}{unit}" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _fused(evidence: Evidence) -> str | None:
    return _mean(evidence.over("trainmux", "eager_vmap")) if evidence.step else None


def _mps(evidence: Evidence) -> str | None:
    found = evidence.over("mps", "eager_vmap")
    return f"MPS is {geometric_mean(found):.1f}× faster than eager `vmap`" if found else None


def _capuchin(evidence: Evidence) -> str | None:
    capuchin, mutwo = (evidence.plan(**GPT2_BY_8, share="1/2", policy=name) for name in ("capuchin", "mutwo"))
    return f"{capuchin['step_ms'] / mutwo['step_ms']:.2f}×" if capuchin and mutwo else None


def _shares(evidence: Evidence, column: str) -> str | None:
    rows = [evidence.plan(**GPT2_BY_8, share="1/2", policy=name) for name in ("mutwo", "capuchin")]
    found = [row[column] for row in rows if row]
    return f"{found[0]:.0%} against {found[1]:.0%}" if len(found) == 2 else None


def _multiplexing(evidence: Evidence) -> str | None:
    """The same partition and policy with and without multiplexing."""
    found = evidence.mutwo
    gains = [
        turns["step_ms"] / ring["step_ms"] - 1
        for subject in found.sizes.subjects
        if (turns := found.step(subject, subject.counts[2], "mutwo_turns"))
        if (ring := found.step(subject, subject.counts[2], "mutwo"))
    ]
    return f"{_range(gains, '+.0%')} ({_share_of_workloads(len(gains))})" if gains else None


def _hidden_swaps(evidence: Evidence) -> str | None:
    names = ("swap_only", "recompute_only", "mutwo")
    ms = [
        row and row["step_ms"] for row in (evidence.plan(**GPT2_BY_8, share="1/10", policy=n) for n in names)
    ]
    return (
        f"`swap_only` {ms[0]:.0f}, `recompute_only` {ms[1]:.0f}, `mutwo` {ms[2]:.0f} ms" if all(ms) else None
    )


def _footprint(evidence: Evidence) -> str | None:
    sizes = {"workload": "gpt2_no_dropout", "batch_size": 36, "width": 8}
    whole, tight = evidence.plan(**sizes, policy="none"), evidence.plan(**sizes, policy="auto")
    if not whole or not tight:
        return None
    times = whole["device_bytes"] / tight["device_bytes"]
    return f"{times:.1f}× at {tight['step_ms'] / whole['step_ms']:.2f}× the time"


def _more_models(evidence: Evidence) -> str | None:
    times = [float(row["times as many"].rstrip("×")) for row in table_d(evidence.mutwo)]
    return f"{_range(times, '.1f', '×')} ({_share_of_workloads(len(times))})" if times else None


def _hours(evidence: Evidence) -> str | None:
    found, saved = evidence.mutwo, dict[str, list[float]]()
    for subject in found.sizes.subjects:
        if subject.workload in (BERT, VIT):
            for members in subject.counts:
                hfta, auto = (found.step(subject, members, way) for way in ("hfta", "auto"))
                if hfta and auto:
                    hours = (hfta["step_ms"] - auto["step_ms"]) * 10_000 / 3.6e6
                    saved.setdefault(subject.workload, []).append(hours)
    hours_of_all = [hours for each in saved.values() for hours in each]
    return f"{_range(hours_of_all, '.1f')} hours ({_share_of_workloads(len(saved), 2)})" if saved else None


def _planning(evidence: Evidence) -> str | None:
    rows = [row for row in evidence.plans if row["policy"] == "mutwo" and "planning_s" in row]
    seconds = [row["planning_s"] for row in rows if "step_ms" in row]
    return f"{min(seconds):.0f} to {max(seconds):.0f} s" if seconds else None


def _converged(evidence: Evidence) -> str | None:
    last = [row["accuracy"][-1] for row in convergence_rows(evidence.mutwo)]
    if len(last) < 3:
        return None
    apart = max(max(each) - min(each) for each in zip(*last, strict=True))
    return f"accuracies at most {apart:.2%} apart"


def _gain(pair: str, column: str = "all") -> Callable[[Evidence], str | None]:
    def gain(evidence: Evidence) -> str | None:
        if evidence.zico is None or pair not in evidence.zico.index:
            return None
        values = [evidence.zico[name][pair] for name in (column, "unlimited")]
        if any(map(math.isnan, values)):
            return None
        return f"{values[0]:.2f}× (without any limit {values[1]:.2f}×)"

    return gain


def _kept(evidence: Evidence) -> str | None:
    """The part of the gain without limits that the smallest budget keeps, over pairs that gain anything."""
    if evidence.zico is None:
        return None
    found = evidence.zico[evidence.zico["unlimited"] >= 1.05]
    kept = ((found["lowest"] - 1) / (found["unlimited"] - 1)).dropna()
    return f"{kept.mean():.0%} in the mean over {len(kept)} pairs ({kept.min():.0%} to {kept.max():.0%})"


def _lifespans(evidence: Evidence) -> str | None:
    if "nasnet" not in evidence.memory:
        return None
    maps, others = (row["mean_seconds"] for row in evidence.memory["nasnet"]["lifespans"].values())
    return f"{1e3 * maps:.0f} against {1e3 * others:.0f} ms"


def _shape(evidence: Evidence) -> str | None:
    """The time that two jobs spend above half of their peaks."""
    found = []
    for name in ("gnmt", "resnet50"):
        if name not in evidence.memory:
            return None
        record = evidence.memory[name]
        spans = zip(record["curve"], record["curve"][1:], strict=False)
        above = sum(end[0] - begin[0] for begin, end in spans if begin[1] > record["peak_bytes"] / 2)
        found.append(f"{above / record['seconds']:.0%}")
    return f"above half the peak for {found[0]} of an iteration; ResNet-50 for {found[1]}"


_AS_RUN = "HFTA as the paper ran it is eager; our steps are compiled and captured as CUDA graphs."
_GPT2 = "8 × GPT-2, batch 8, half of the activation memory"
_SMALL_JOBS = "An iteration takes 3 to 40 ms on an H200 and runs as graphs, which leave less of the GPU idle."
CLAIMS = (
    Claim(
        *("µ-TWO", "Faster than HFTA within the GPU's memory", "up to 3×"),
        lambda evidence: _over_hfta(evidence, "hfta"),
        *("SGD, 40 GB", _AS_RUN),
    ),
    Claim(
        *("µ-TWO", "Faster than HFTA where memory is no limit", "–", _fused),
        *("8 models of each workload, AdamW, no budget", _AS_RUN),
    ),
    Claim(
        *("µ-TWO", "Faster than HFTA-Capuchin within the GPU's memory", "always"),
        lambda evidence: _over_hfta(evidence, "capuchin"),
        *("SGD, 40 GB", "Both run on our engine; Capuchin decides for the whole array."),
    ),
    Claim(
        *("µ-TWO", "The paper's policy is faster than Capuchin's", "always", _capuchin, _GPT2),
        "Below half of the memory Capuchin finds no plan: the array has no other half to take turns with.",
    ),
    Claim(
        *("µ-TWO", "Share of compute time spent on recomputation, against HFTA-Capuchin", "less than half"),
        *(
            lambda evidence: _shares(evidence, "recompute_share"),
            _GPT2,
            "Sub-arrays of four pass the limit by less.",
        ),
    ),
    Claim(
        *("µ-TWO", "Share of swap time that is hidden, against HFTA-Capuchin", "2 to 3 times as much"),
        *(lambda evidence: _shares(evidence, "swap_overlap"), _GPT2, "Fewer swaps are needed at all."),
    ),
    Claim(
        *("µ-TWO", "Multiplexing sub-arrays, by itself", "no number", _multiplexing),
        *(
            "SGD, 40 GB",
            "Sub-arrays in turns need as little memory; few swaps are left to hide.",
        ),
    ),
    Claim(
        *("µ-TWO", "Swapping alone stalls, recomputing alone is superfluous work", "in words", _hidden_swaps),
        "8 × GPT-2, batch 8, a tenth of the activation memory",
        "Recomputation is cheaper here: compute has grown faster than the link to the host.",
    ),
    Claim(
        *("µ-TWO", "Footprint over the memory of the GPU", "up to 6×", _footprint),
        *("8 × GPT-2, batch 36, policy `auto`", "–"),
    ),
    Claim(
        *("µ-TWO", "More models in the same memory", "3 to 5×", _more_models),
        *("SGD, 40 GB", "No more than that were tried."),
    ),
    Claim(
        *("µ-TWO", "Saved over 10,000 iterations", "5 to 40 hours", _hours),
        *("BERT and ViT, SGD, 40 GB", "An H200 is faster than an A100: every hour is shorter."),
    ),
    Claim(
        *("µ-TWO", "Scheduling takes", "within a minute", _planning),
        *("8 × GPT-2, policy `mutwo`, once profiled", "–"),
    ),
    Claim(
        *(
            "µ-TWO",
            "HFTA is faster than processes under MPS",
            "3 to 11× over other ways, by HFTA's authors",
            _mps,
        ),
        *(
            "8 models of each workload, AdamW",
            "Contradicts: eager `vmap` adds copies, and MPS fills a large GPU.",
        ),
    ),
    Claim(
        *("µ-TWO", "Training is unchanged", "no curves", _converged),
        *("4 language models, one by one, as a fleet and planned", "bf16 rounding."),
    ),
    *(
        Claim(
            "Zico",
            f"{said} against turns",
            f"{paper}×",
            _gain(pair),
            "with the memory that both need",
            _SMALL_JOBS,
        )
        for said, paper, pair in (
            ("RHN+GNMT", 1.42, "rhn+gnmt"),
            ("NASNet+GNMT", 1.46, "nasnet+gnmt"),
            ("BERT+GNMT", 1.27, "bert+gnmt"),
            ("NASNet+ResNet-110", 1.15, "nasnet+resnet110"),
            ("Two NASNets", 1.35, "nasnet+nasnet"),
            ("Two GNMTs", 1.37, "gnmt+gnmt"),
        )
    ),
    Claim(
        *(
            "Zico",
            "The gain stays where memory is short",
            "in every pair",
            _kept,
            "the smallest budget of each pair",
        ),
        "Measured when only feature maps were shared. Gradients and temporaries are shared now, too.",
    ),
    Claim(
        *("Zico", "NASNet's feature maps live longer than its other tensors, mean", "134 against 18 ms"),
        *(_lifespans, "128 images", "The GPU is faster."),
    ),
    Claim(
        *("Zico", "GNMT's memory has a lean shape, ResNet-50's a beefy one", "in words", _shape),
        *("256 pairs of 16 tokens", "Contradicts at this size: short texts, two layers, a large vocabulary."),
    ),
)


def rows(evidence: Evidence) -> list[dict[str, str]]:
    """Every claim that has a number here."""
    found = []
    for each in CLAIMS:
        here = each.measured(evidence)
        if here is not None:
            row = {"paper": each.paper, "claim": each.claim, "the paper's number": each.said, "here": here}
            found.append({**row, "on what": each.subject, "why they differ": each.why})
    return found


def part(name: str, evidence: Evidence) -> str:
    """The table, and which claims have no number yet."""
    if name != "table":
        raise ValueError(f"expected the part table; got {name!r}")
    missing = [
        f"{each.claim[0].lower()}{each.claim[1:]}" for each in CLAIMS if each.measured(evidence) is None
    ]
    told = f"\n\nNot measured yet: {'; '.join(missing)}." if missing else ""
    return markdown(rows(evidence), num_left=6) + told


def command(
    page: Annotated[Path, typer.Argument(help="Page with the table.")] = Path("docs/papers.md"),
) -> None:
    """Fill the table of the papers' claims from committed results."""
    fill(page, "claims", lambda name: part(name, Evidence()))
    print(f"written to {page}")
