"""The ways that are compared. To add one: write its ``prepare`` and give it a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..job import Job, Measurement
from ..measure import Prepare, measure_steps
from . import compiled, eager, fused, processes, stacked

FUSED = "trainmux"
VARIANT_SEPARATOR = ":"
WIDTH_SEPARATOR = "@"


@dataclass(frozen=True)
class Way:
    """A way of training and how it is measured.

    ``clean_up(folder)`` is called when the measuring process has ended, however it did. The result of a way
    that ``is_same_at_any_width`` is measured once for all widths. One that does not take turns is built
    alone; one that ``builds_in_turn`` has nothing to compile, and leaves the device alone before its turn.
    """

    name: str
    description: str
    measure: Callable[[Job], Measurement]
    needs_cuda: bool = False
    is_same_at_any_width: bool = False
    takes_turns: bool = True
    builds_in_turn: bool = False
    clean_up: Callable[[Path], None] = lambda folder: None


def _stepping(
    prepare: Prepare, num_models: int | None = None, builds_in_turn: bool = False
) -> Callable[[Job], Measurement]:
    return partial(measure_steps, prepare, num_models=num_models, builds_in_turn=builds_in_turn)


_TABLE = (
    Way(
        "eager",
        "one model after another in eager torch; fused AdamW on CUDA, channels-last for convolutions",
        _stepping(eager.prepare, builds_in_turn=True),
        builds_in_turn=True,
    ),
    Way(
        "compiled_graph",
        "one model after another, each with `torch.compile` and fused AdamW, its whole step one CUDA graph; "
        f"{compiled.NUM_MODELS} models take turns",
        _stepping(compiled.prepare, compiled.NUM_MODELS),
        needs_cuda=True,
        is_same_at_any_width=True,
    ),
    Way(
        "eager_vmap",
        "horizontal fusion as in HFTA, by `torch.func.vmap` over all members: eager, AdamW by multi-tensor "
        "operators over the stacked parameters with a learning rate per member",
        _stepping(stacked.prepare_eager, builds_in_turn=True),
        builds_in_turn=True,
    ),
    Way(
        "compiled_vmap_graph",
        "that step, update included, by `torch.compile`, captured as one CUDA graph",
        _stepping(stacked.prepare_captured),
        needs_cuda=True,
    ),
    Way(
        "mps",
        "one process per member, each as in `eager`, all at once under NVIDIA's Multi-Process Service",
        processes.measure,
        needs_cuda=True,
        takes_turns=False,
        clean_up=processes.stop_daemon,
    ),
    Way(FUSED, "all members as one `trainmux.Fleet`", _stepping(fused.prepare)),
)

WAYS: dict[str, Way] = {way.name: way for way in _TABLE}


def find_way(label: str) -> Way:
    """The way of that name, or behind a variant ``trainmux:NAME``; ``KeyError`` where there is none."""
    return WAYS[label.partition(VARIANT_SEPARATOR)[0]]


def split_width(label: str) -> tuple[str, int | None]:
    """``NAME@WIDTH`` → name and width; a name alone has the widths of the run."""
    name, separator, width = label.partition(WIDTH_SEPARATOR)
    return name, int(width) if separator else None


def default_ways(on_cuda: bool) -> list[str]:
    """What is measured when no way is named: all that the device can do."""
    return [way.name for way in WAYS.values() if on_cuda or not way.needs_cuda]
