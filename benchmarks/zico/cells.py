"""What there is to measure: cells, the figures and tables that they belong to, and their order.

A cell is one way to train some jobs on one device, or one look at a job's memory. Cells that share a process
are measured together, for building a job takes longer than training it; those of rank 0 come first, so that a
run which is cut off has measured what tells most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from benchmarks.resumable import Ranked

from .cases import MODELS
from .colocated import ALL_MEMORY, CHANGES, excess_way

ALONE, TEMPORAL, UNLIMITED = "alone", "temporal", "two streams, unlimited"
EAGER_TEMPORAL, EAGER_THREADS = "eager temporal", "two eager threads"
TWO_PROCESSES, MPS = "two processes", "MPS"
PROCESS_WAYS = tuple(f"{how}, {kind}" for how in (TWO_PROCESSES, MPS) for kind in ("eager", "graphs"))
ITERATION, HOST_VIEW = "iteration", "host view"
NO_TRACKING, EVERY_KERNEL = "no tracking", "every kernel"
TRACKING = {NO_TRACKING: 1 << 60, EVERY_KERNEL: 0, "8 MB": 8 << 20, "256 MB": 256 << 20}
"""Table 1: bytes of feature maps between two cuts."""
EXCESSES = (1.3, 1.8)
"""By how much both jobs' peaks exceed a tight budget."""
TIGHT = tuple(map(excess_way, EXCESSES))


@dataclass(frozen=True)
class Cell:
    """``experiment`` is "train" (``jobs`` at once or in turn), "memory" (a look at one job), "tracking" or
    "regions" (Tables 1 and 2). ``jobs`` are names with plus signs."""

    experiment: str
    jobs: str
    way: str

    @property
    def key(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.jobs.split("+"))

    @property
    def process(self) -> tuple[str, ...]:
        """Cells of one process: ways of several processes each have one to start them from."""
        return (self.experiment, *((self.jobs, self.way) if self.way in PROCESS_WAYS else ()))

    def __str__(self) -> str:
        return f"{self.experiment}: {self.jobs}, {self.way}"


Pairs = tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """Which jobs each figure shows. ``axis`` has the batch sizes of each model in Figures 5 and 6."""

    models: tuple[str, ...]
    axis: Mapping[str, tuple[str, ...]]
    figure_8: tuple[Pairs, ...]
    """For every pair its combinations of batch sizes, the usual ones first."""
    sampled: Pairs
    """Figures 7 and 9: memory over time in tight budgets."""
    changing: Pairs
    """Figure 10: budgets that change."""
    several: Pairs
    """Three and more jobs."""
    micro_batches: Pairs
    published: Pairs
    """Models of the size that their authors published; their traces take minutes."""
    regions: Mapping[str, int]
    """Table 2: bytes of a region."""
    host_view: str

    @property
    def equal(self) -> list[str]:
        return [f"{name}+{name}" for model in self.models for name in self.axis[model]]

    @property
    def all_pairs(self) -> list[str]:
        """Pairs of different models that Figure 8 does not have, and all that it has."""
        known = [pairs[0] for pairs in self.figure_8]
        sets = [set(pair.split("+")) for pair in known]
        return [*known, *("+".join(two) for two in combinations(self.models, 2) if set(two) not in sets)]


def _combined(one: str, two: str, large: tuple[str, str]) -> Pairs:
    return f"{one}+{two}", f"{large[0]}+{two}", f"{one}+{large[1]}"


_AXIS = {
    "nasnet": ("nasnet", "nasnet@64", "nasnet@256"),
    "resnet110": ("resnet110", "resnet110@256", "resnet110@1024"),
    "resnet50": ("resnet50", "resnet50@48", "resnet50@192"),
    "gnmt": ("gnmt", "gnmt@1024", "gnmt@2048"),
    "rhn": ("rhn", "rhn@1024", "rhn@2048"),
    "bert": ("bert", "bert@32", "bert@128"),
}
PAPER_SIZES = Sizes(
    MODELS,
    _AXIS,
    (
        ("rhn+gnmt", "rhn@1024+gnmt@1024", "rhn+gnmt@1024"),
        _combined("nasnet", "gnmt", ("nasnet@64", "gnmt@1024")),
        _combined("bert", "gnmt", ("bert@32", "gnmt@1024")),
        _combined("nasnet", "resnet110", ("nasnet@64", "resnet110@1024")),
    ),
    ("nasnet+resnet110", "resnet110+resnet110", "bert+bert"),
    ("nasnet+nasnet", "nasnet+resnet110"),
    ("rhn+gnmt+resnet110", "rhn+gnmt+resnet110+bert"),
    ("gnmt/2+gnmt/2", "rhn/2+rhn/2"),
    ("gnmt8+gnmt8", "rhn35+rhn35"),
    {"2 MiB": 2 << 20, "64 MiB": 64 << 20},
    "resnet50",
)
_MLP, _OTHER = "small:mlp", "small:mlp/2"
SMALL_SIZES = Sizes(
    (_MLP,),
    {_MLP: (_MLP,)},
    ((f"{_MLP}+{_OTHER}",),),
    (f"{_MLP}+{_OTHER}", f"{_MLP}+{_MLP}"),
    (f"{_MLP}+{_MLP}",),
    (f"{_MLP}+{_MLP}+{_OTHER}",),
    (f"{_MLP}/2+{_MLP}/2",),
    (f"{_MLP}+{_MLP}",),
    {"512 B": 512, "4 KiB": 4096},
    _MLP,
)
SIZES = {"paper": PAPER_SIZES, "small": SMALL_SIZES}

_COLOCATED = (ALL_MEMORY, *TIGHT)
_GRAPHS = (ALONE, TEMPORAL, UNLIMITED, *_COLOCATED)
_EAGER = (EAGER_TEMPORAL, EAGER_THREADS)


def _train(rank: int, jobs: Iterable[str], ways: Sequence[str]) -> Iterator[Ranked[Cell]]:
    for names in jobs:
        for way in ways:
            yield rank, Cell("train", names, way)


def _figure_8(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """Different jobs, with several combinations of batch sizes; also in plain torch."""
    for first, *others in sizes.figure_8:
        yield from _train(0, [first], (*_GRAPHS, *_EAGER))
        yield from _train(3, others, _GRAPHS)


def _figure_5(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """Two jobs of the same model, along the axis of batch sizes."""
    for model in sizes.models:
        yield from _train(1, [f"{name}+{name}" for name in sizes.axis[model][:1]], _GRAPHS)
        yield from _train(4, [f"{name}+{name}" for name in sizes.axis[model][1:]], _GRAPHS)


def _figure_6(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    """What both jobs of Figure 5 need."""
    yield from ((rank, cell) for rank, cell in _figure_5(sizes) if cell.way in (ALONE, ALL_MEMORY))


def _figure_10(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    return _train(2, sizes.changing, (ALONE, TEMPORAL, *CHANGES))


def _sampled(sizes: Sizes, *, equal: bool) -> Iterator[Ranked[Cell]]:
    pairs = [pair for pair in sizes.sampled if (len(set(pair.split("+"))) == 1) is equal]
    return _train(1 if equal else 0, pairs, (ALONE, TEMPORAL, *TIGHT))


def _pairs(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    return _train(2, sizes.all_pairs, _GRAPHS)


def _processes(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    return _train(5, [pairs[0] for pairs in sizes.figure_8], (ALONE, TEMPORAL, *PROCESS_WAYS))


def _memory(names: Iterable[str], way: str = ITERATION) -> Iterator[Ranked[Cell]]:
    return ((2, Cell("memory", name, way)) for name in names)


def _table_1(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    return ((6, Cell("tracking", name, way)) for name in sizes.models for way in TRACKING)


def _table_2(sizes: Sizes) -> Iterator[Ranked[Cell]]:
    pairs = (f"{name}+{name}" for name in sizes.models)
    return ((6, Cell("regions", pair, way)) for pair in pairs for way in sizes.regions)


FIGURES: dict[str, Callable[[Sizes], Iterator[Ranked[Cell]]]] = {
    "figure_8": _figure_8,
    "figure_5": _figure_5,
    "figure_6": _figure_6,
    "figure_7": lambda sizes: _sampled(sizes, equal=True),
    "figure_9": lambda sizes: _sampled(sizes, equal=False),
    "figure_10": _figure_10,
    "figure_1": lambda sizes: _memory(sizes.models[:1]),
    "figure_2": lambda sizes: _memory(sizes.models),
    "figure_3": lambda sizes: _memory([sizes.host_view], HOST_VIEW),
    "pairs": _pairs,
    "processes": _processes,
    "table_1": _table_1,
    "table_2": _table_2,
    "several": lambda sizes: _train(7, sizes.several, _GRAPHS),
    "micro_batches": lambda sizes: _train(7, sizes.micro_batches, _GRAPHS),
    "published": lambda sizes: _train(8, sizes.published, _GRAPHS),
}
