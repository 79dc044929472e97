"""``trainmux bench step`` and ``trainmux bench report``: their options, checked, and what they print."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmux.cli._device import DeviceChoice

if TYPE_CHECKING:
    from .record import Record

LOG_WIDTH = 200


app = typer.Typer(name="bench", no_args_is_help=True, help="Measure step times, and report them.")


@app.command()
def step(
    workloads: Annotated[
        str,
        typer.Option(help="Names, with commas; small:NAME for the tiny ones.", show_default="all full-size"),
    ] = "",
    ways: Annotated[
        str,
        typer.Option(
            help="Ways to train, with commas; NAME@WIDTH for a width of its own.",
            show_default="all the device can do",
        ),
    ] = "",
    widths: Annotated[str, typer.Option(help="Numbers of members, with commas.")] = "8",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of each member.", show_default="each workload's usual one")
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="Where to train.")] = DeviceChoice.AUTO,
    fleet: Annotated[str, typer.Option(help="Further arguments for Fleet, as a JSON object.")] = "{}",
    variant: Annotated[
        list[str] | None,
        typer.Option(help="NAME=JSON: also measure trainmux:NAME, with these arguments. Repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the records go, as JSON.")] = Path("runs/bench/step.json"),
    plot: Annotated[Path | None, typer.Option(help="Also draw a bar chart, as SVG.")] = None,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds that one measurement may take.")] = 240.0,
    steps_seconds: Annotated[float, typer.Option(min=1e-3, help="Seconds of one block of steps.")] = 0.3,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that are timed.")] = 5,
    builds_at_once: Annotated[
        int, typer.Option(min=1, help="Measurements that are built side by side; they are timed in turn.")
    ] = 1,
) -> None:
    """Measure the time of a training step per member: workloads × ways × numbers of members."""
    import torch

    from .cases import case_names, default_names, find_case
    from .job import BenchError
    from .runner import Options, run
    from .ways.table import FUSED, VARIANT_SEPARATOR, WAYS, default_ways, split_width

    if device is DeviceChoice.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; use cpu or auto", param_hint="--device")
    on_cuda = device is DeviceChoice.CUDA or (device is DeviceChoice.AUTO and torch.cuda.is_available())
    variants = dict(_variant(text) for text in variant or [])
    chosen_ways = _ways(ways, WAYS) or ([] if variants else default_ways(on_cuda))
    options = Options(
        workloads=_names(workloads, case_names(), "--workloads") or default_names(),
        ways=chosen_ways,
        widths=_widths(widths),
        device="cuda" if on_cuda else "cpu",
        out=out,
        batch_size=batch_size,
        plot=plot,
        time_limit_s=time_limit,
        block_seconds=steps_seconds,
        num_blocks=blocks,
        fleet=_object(fleet, "--fleet"),
        variants=variants,
        builds_at_once=builds_at_once,
    )
    if options.fleet and not variants and FUSED not in {split_width(way)[0] for way in chosen_ways}:
        raise typer.BadParameter(f"is for the way {FUSED}, which --ways leaves out", param_hint="--fleet")
    if any(VARIANT_SEPARATOR in name or "," in name for name in variants):
        raise typer.BadParameter("expected names without ':' and ','", param_hint="--variant")
    for case in map(find_case, options.workloads):
        if batch_size is not None and not case.is_resizable and batch_size not in case.batch_sizes:
            raise typer.BadParameter(
                f"{case.name} has batches of {case.batch_sizes[0]} only, got {batch_size}; leave it out",
                param_hint="--batch-size",
            )
    try:
        records = run(options, tell=_tell)
    except BenchError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    _show(records)
    typer.echo(f"written to {out}")
    if plot is not None:
        _draw(plot, records)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Files that bench step wrote; later ones win.")],
    markdown: Annotated[Path | None, typer.Option(help="Write the page of benchmarks here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the bar chart here, as SVG.")] = None,
) -> None:
    """Put measured records together: as tables here, as a page, as a chart."""
    from .job import BenchError
    from .markdown import page
    from .record import merge, read_records, write_text

    try:
        records = merge(read_records(path) for path in results)
    except BenchError as error:
        raise typer.BadParameter(str(error), param_hint="RESULTS") from None
    _show(records)
    if plot is not None:
        _draw(plot, records)
    if markdown is not None:
        words = ["trainmux", "bench", "report", *map(str, results), "--markdown", str(markdown)]
        words += ["--plot", str(plot)] if plot is not None else []
        address = Path(os.path.relpath(plot, markdown.parent)).as_posix() if plot is not None else None
        write_text(markdown, page(records, shlex.join(words), address))
        typer.echo(f"written to {markdown}")


def _names(text: str, known: Collection[str], option: str) -> list[str]:
    """Names between commas, each once; refuses those that are not known, with the list of those that are."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"expected some of {', '.join(known)}; got {', '.join(unknown)}", param_hint=option
        )
    return names


def _ways(text: str, known: Collection[str]) -> list[str]:
    """The names of ways, some with a width of their own."""
    from .ways.table import WIDTH_SEPARATOR

    labels = list(dict.fromkeys(label.strip() for label in text.split(",") if label.strip()))
    for label in labels:
        name, separator, width = label.partition(WIDTH_SEPARATOR)
        _names(name, known, "--ways")
        if separator and (not width.isdecimal() or int(width) < 1):
            raise typer.BadParameter(
                f"expected NAME@WIDTH with a whole number of at least 1; got {label!r}", param_hint="--ways"
            )
    return labels


def _widths(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(
            f"expected whole numbers of at least 1, with commas; got {text!r}", param_hint="--widths"
        )
    return found


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"expected a JSON object, got {text!r} ({error})", param_hint=option
        ) from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"expected a JSON object, got {text!r}", param_hint=option)
    return found


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    name, equals, arguments = text.partition("=")
    if not name.strip() or not equals:
        raise typer.BadParameter(f"expected NAME=JSON, got {text!r}", param_hint="--variant")
    return name.strip(), _object(arguments, "--variant")


def _tell(record: Record) -> None:
    from .tables import number, row_name

    timing = None if record.measurement is None else record.measurement.timing
    result = (
        f"failed: {record.error}"
        if timing is None
        else f"{number(timing.median_ms)} ms per member and step, first step after {timing.build_s:.1f} s"
    )
    typer.echo(f"{row_name(record.row)}, {record.way}: {result}")


def _show(records: Sequence[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    from .tables import compare, failures, times_and_speedups

    # Where nobody looks at a terminal, such as in a log, a table may be as wide as it likes.
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    for device in dict.fromkeys(record.row.device for record in records):
        of_device = [record for record in records if record.row.device == device]
        for grid in times_and_speedups(compare(of_device)):
            table = Table(title=f"{grid.title}\n{device}")
            for index, heading in enumerate(grid.headings):
                table.add_column(heading, justify="right" if index else "left", overflow="fold")
            for row in grid.rows:
                table.add_row(*row)
            console.print(table)
        for line in failures(of_device):
            console.print(line, markup=False)


def _draw(plot: Path, records: Sequence[Record]) -> None:
    from .record import write_text
    from .svg import chart

    write_text(plot, chart(records))
    typer.echo(f"written to {plot}")
