"""``python -m benchmarks mutwo``: measure the µ-TWO paper's evaluation, or draw it from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases import split
from benchmarks.environment import choose_device
from benchmarks.records import read as read_results
from benchmarks.resumable import Session, find_tasks

from .cells import FIGURES, SIZES
from .planned import Protocol
from .run import bench


def command(
    only: Annotated[str, typer.Option(help="Figures to measure, with commas.", show_default="all")] = "",
    ways: Annotated[str, typer.Option(help="Ways to measure, with commas.", show_default="all")] = "",
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds after which nothing is begun.")] = 540.0,
    out: Annotated[Path, typer.Option(help="File of results; what it has is not measured again.")] = Path(
        "runs/bench/mutwo.json"
    ),
    merge: Annotated[
        list[Path] | None, typer.Option(help="Results to add to that file first; may be given several times.")
    ] = None,
    retry: Annotated[bool, typer.Option(help="Measure cells again that failed.")] = False,
    show: Annotated[
        bool, typer.Option("--list", help="Measure nothing: list the cells that are left.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    sizes: Annotated[str, typer.Option(help="paper, or small for a CPU.")] = "paper",
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    warmups: Annotated[int, typer.Option(min=2, help="Warm-up iterations, as in §5.2.")] = 100,
    warmup_seconds: Annotated[
        float, typer.Option(help="Warming up ends after so long, but not before 20 iterations.")
    ] = 10.0,
    measured: Annotated[int, typer.Option(min=1, help="Iterations of which the median counts.")] = 10,
    plan_seconds: Annotated[float, typer.Option(help="Time limit of a plan.")] = 60.0,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read this file of results.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Page whose tables and pictures are drawn from the results.")
    ] = None,
) -> None:
    """Repeat the µ-TWO paper's evaluation: many models at once inside budgets, against HFTA and others."""
    if sizes not in SIZES:
        raise typer.BadParameter(f"expected {' or '.join(SIZES)}; got {sizes}", param_hint="--sizes")
    if read is None:
        try:
            tasks = find_tasks(FIGURES, SIZES[sizes], split(only) or list(FIGURES), split(ways))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--only") from None
        place = choose_device(device)
        protocol = Protocol(
            *(place, precision, warmups, warmup_seconds, measured),
            *(SIZES[sizes].real, plan_seconds, SIZES[sizes].text),
        )
        Session(place, out, merge or [], retry, show, time_limit).run(bench(protocol), tasks)
        if show:
            return
    if page is not None:
        from .page import refresh

        for path in refresh(read_results(read or out, "mutwo"), page, SIZES[sizes]):
            print(f"written to {path}")
