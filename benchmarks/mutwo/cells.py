"""What there is to measure: cells, the figures and tables that they belong to, and their order.

A cell is one experiment with one way to train. Cells that share a process are measured together; those of
rank 0 come first, so that a run which is cut off has measured what tells most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.resumable import Ranked

HFTA, MPS, SAVE_ON_CPU, ACTIVATION_BUDGET = "hfta", "mps", "save_on_cpu", "activation_budget"
BASELINES = (HFTA, MPS, SAVE_ON_CPU, ACTIVATION_BUDGET)
CONVERGENCE_WAYS = ("one by one", "fleet", "planned fleet")
ALL = "all"
"""The budget of a cell that may take the whole device. Others are bytes in words ("40GB"), or a share ("1/6",
"2") of what the plan of the same members needs with nothing offloaded or recomputed."""
TIGHT = "tight"
"""The budget of the planned fleet that converges: a part of what its feature maps take."""
A100, V100, SMALL_GPU = "40GB", "32GB", "16GB"
BERT, VIT, GPT2, DLRM = "bert_base_nsp_no_dropout", "vit_60m", "gpt2_no_dropout", "dlrm"
TEXT = "python text"


@dataclass(frozen=True)
class Cell:
    """``experiment`` is "step" (an iteration's time), "run" (so many iterations really made), "timeline"
    (tensors and memory over an iteration) or "convergence"."""

    experiment: str
    workload: str
    batch_size: int
    optimizer: str
    members: int
    budget: str
    way: str

    @property
    def key(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def process(self) -> tuple[Any, ...]:
        """Cells of one process: a fleet goes from plan to plan, HFTA's subsets serve any number of models."""
        alike = (self.experiment, self.workload, self.batch_size, self.optimizer)
        if self.way == HFTA:
            return (*alike, HFTA, self.budget)
        own = (self.way, self.budget) if self.way in BASELINES or self.experiment == "convergence" else ()
        return (*alike, self.members, *own)

    def __str__(self) -> str:
        sizes = f"{self.members} × {self.workload}, batch {self.batch_size}, {self.optimizer}"
        return f"{self.experiment}: {sizes}, {self.budget}, {self.way}"


@dataclass(frozen=True)
class Subject:
    """A workload with the batch sizes of Table 1 and the numbers of models that are trained at once."""

    workload: str
    batch_sizes: tuple[int, ...]
    counts: tuple[int, int, int]
    both: bool = False
    """Whether the second batch size is measured at every number of models."""


@dataclass(frozen=True)
class TextSizes:
    """The convergence experiment: members, their model, iterations, and bytes that are held out."""

    members: int
    hidden_size: int
    num_layers: int
    steps: int
    held_out: int


@dataclass(frozen=True)
class Sizes:
    """The six workloads, the budgets in place of the two GPUs' memory, and what belongs to single figures."""

    subjects: tuple[Subject, ...]
    budget: str
    small_budget: str
    v100: tuple[tuple[str, int], ...]
    v100_budget: str
    timeline_batch: int
    many: tuple[int, ...]
    real: int
    """Iterations that are really run for Figure 7."""
    text: TextSizes


# Counts: the smallest is what HFTA has about room for in 40 GB with SGD, or twice that (estimated from its
# memory with AdamW, step_h200.json). The largest, but for DLRM's, passes 40 GB on our engine too, which needs
# less per model; for 64 BERTs or 32 GPT-2s HFTA-Capuchin finds no plan (predicted). V100: batches smaller by
# the memory of the two GPUs. Many: 60 need 98 GiB of host memory, 16 bytes a parameter.
PAPER_SIZES = Sizes(
    (
        Subject(BERT, (16, 24), (16, 32, 48), both=True),
        Subject(VIT, (8, 16), (24, 48, 96), both=True),
        Subject(GPT2, (8, 16), (8, 16, 24)),
        Subject("resnet101", (48, 64), (8, 16, 32)),
        Subject("mobilenet_v3_large", (64, 128), (16, 32, 64)),
        Subject(DLRM, (512, 1024), (32, 64, 128)),
    ),
    A100,
    SMALL_GPU,
    ((BERT, 12), (DLRM, 384)),
    V100,
    timeline_batch=32,
    many=(40, 60),
    real=1000,
    text=TextSizes(4, 192, 4, 1000, 64 << 10),
)
_TINY = Subject("small:mlp", (4, 4), (2, 2, 2), both=True)
SMALL_SIZES = Sizes(
    (_TINY,),
    "2",
    "2",
    (("small:mlp", 4),),
    "3",
    timeline_batch=4,
    many=(2,),
    real=3,
    text=TextSizes(2, 8, 1, 3, 2 << 10),
)
SIZES = {"paper": PAPER_SIZES, "small": SMALL_SIZES}


def _step(
    subject: str, batch: int, members: int, budget: str, ways: Iterable[str], **kinds: str
) -> list[Cell]:
    experiment, optimizer = kinds.get("experiment", "step"), kinds.get("optimizer", "sgd")
    return [Cell(experiment, subject, batch, optimizer, members, budget, way) for way in ways]


_PLANNED = ("auto", "capuchin", "mutwo")
_COMPARED = (HFTA, *_PLANNED)


def _figure_8(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """Speed-up over HFTA: the largest number of models first."""
    for subject in sizes.subjects:
        for rank, members in zip((4, 1, 0), subject.counts, strict=True):
            for cell in _step(subject.workload, subject.batch_sizes[0], members, sizes.budget, _COMPARED):
                yield rank, cell
            if subject.both:
                for cell in _step(subject.workload, subject.batch_sizes[1], members, sizes.budget, _COMPARED):
                    yield rank + 5, cell


def _figure_8_v100(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    counts = {subject.workload: subject.counts for subject in sizes.subjects}
    for workload, batch_size in sizes.v100:
        for members in counts[workload]:
            for cell in _step(workload, batch_size, members, sizes.v100_budget, _COMPARED):
                yield 8, cell


def _figure_3(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    first = sizes.subjects[0].workload
    for cell in _step(first, sizes.timeline_batch, 1, ALL, ["none"], experiment="timeline"):
        yield 2, cell
    for subject in sizes.subjects:
        for batch_size in subject.batch_sizes:
            for cell in _step(subject.workload, batch_size, 4, ALL, [HFTA]):
                yield 7, cell


def _figure_7(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """10,000 iterations follow from Figure 8's cells; fewer are really run, of the fewest models."""
    for subject in sizes.subjects:
        if subject.both:
            members, batch_size = subject.counts[0], subject.batch_sizes[0]
            compared = ("auto", HFTA)
            for cell in _step(
                subject.workload, batch_size, members, sizes.budget, compared, experiment="run"
            ):
                yield 10, cell
    yield from ((rank, cell) for rank, cell in _figure_8(sizes) if cell.way in ("auto", "mutwo", HFTA))


def _figure_9(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    both = {subject.workload for subject in sizes.subjects if subject.both}
    yield from ((rank, cell) for rank, cell in _figure_8(sizes) if cell.workload in both)


def _table_e(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """Policies by themselves, on our own engine, and multiplexing apart from fusion in sub-arrays."""
    others = ("none", "swap_only", "recompute_only", "mutwo_turns")
    for subject in sizes.subjects:
        for cell in _step(
            subject.workload,
            subject.batch_sizes[0],
            subject.counts[2],
            sizes.budget,
            (*others, *_PLANNED),
        ):
            yield 6, cell


def _others(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """Ways of torch and of the driver."""
    ways = (SAVE_ON_CPU, ACTIVATION_BUDGET, MPS)
    for subject in sizes.subjects:
        for cell in _step(subject.workload, subject.batch_sizes[0], subject.counts[1], sizes.budget, ways):
            yield 6, cell


def _adamw(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    for subject in sizes.subjects:
        batch_size, members = subject.batch_sizes[0], subject.counts[1]
        for cell in _step(
            subject.workload, batch_size, members, sizes.budget, ("auto", HFTA), optimizer="adamw"
        ):
            yield 3, cell


def _footprint(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """A footprint of six times the budget, and the same members with all the memory there is."""
    for subject in sizes.subjects:
        batch_size, members = subject.batch_sizes[0], subject.counts[1]
        for budget, way in ((ALL, "none"), ("1/6", "auto")):
            for cell in _step(subject.workload, batch_size, members, budget, [way]):
                yield 3, cell


def _many(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """A few members with AdamW without any pressure; then as many as host memory holds, on a small GPU."""
    subject = sizes.subjects[0]
    fleets = ((subject.counts[0] // 2, ALL), *((members, sizes.small_budget) for members in sizes.many))
    for rank, (members, budget) in zip((2, 2, 9), fleets, strict=False):
        for cell in _step(
            subject.workload, subject.batch_sizes[0], members, budget, ["auto"], optimizer="adamw"
        ):
            yield rank, cell


def _convergence(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    for way in CONVERGENCE_WAYS:
        yield (
            2,
            Cell(
                "convergence",
                TEXT,
                32,
                "adamw",
                sizes.text.members,
                TIGHT if way == "planned fleet" else ALL,
                way,
            ),
        )


FIGURES: dict[str, Callable[[Sizes], Iterator[Ranked[Cell]]]] = {
    "figure_8": _figure_8,
    "convergence": _convergence,
    "figure_3": _figure_3,
    "many": _many,
    "adamw": _adamw,
    "footprint": _footprint,
    "figure_9": _figure_9,
    "table_e": _table_e,
    "others": _others,
    "figure_8_v100": _figure_8_v100,
    "figure_7": _figure_7,
}
