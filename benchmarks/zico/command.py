"""``python -m benchmarks zico``: measure the Zico paper's evaluation, or draw it from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases import split
from benchmarks.environment import choose_device
from benchmarks.records import read as read_results
from benchmarks.resumable import Session, find_tasks

from .cells import FIGURES, SIZES


def command(
    only: Annotated[str, typer.Option(help="Figures to measure, with commas.", show_default="all")] = "",
    ways: Annotated[str, typer.Option(help="Ways to measure, with commas.", show_default="all")] = "",
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds after which nothing is begun.")] = 540.0,
    out: Annotated[Path, typer.Option(help="File of results; what it has is not measured again.")] = Path(
        "runs/bench/zico.json"
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
    lowering: Annotated[
        str, typer.Option(help="inductor or aten.", show_default="inductor on a GPU, aten on a CPU")
    ] = "",
    seconds: Annotated[float, typer.Option(min=1e-3, help="Time for each way to train.")] = 1.0,
    counted: Annotated[int, typer.Option(min=1, help="Iterations of each co-located job to count.")] = 64,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read this file of results.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Page whose tables and pictures are drawn from the results.")
    ] = None,
) -> None:
    """Repeat the Zico paper's evaluation: jobs on one device by turns, at once, and co-located in budgets."""
    if sizes not in SIZES:
        raise typer.BadParameter(f"expected {' or '.join(SIZES)}; got {sizes}", param_hint="--sizes")
    if read is None:
        from .jobs import ZicoOptions
        from .run import bench

        try:
            tasks = find_tasks(FIGURES, SIZES[sizes], split(only) or list(FIGURES), split(ways))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--only") from None
        place = choose_device(device)
        lowered = lowering or ("aten" if place == "cpu" else "inductor")
        options = ZicoOptions(place, lowered, precision, seconds, counted, SIZES[sizes].sampled)
        Session(place, out, merge or [], retry, show, time_limit).run(bench(options, SIZES[sizes]), tasks)
        if show:
            return
    if page is not None:
        from .page import refresh

        for path in refresh(read_results(read or out, "zico"), page):
            print(f"written to {path}")
