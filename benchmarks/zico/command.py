"""``python -m benchmarks zico``: measure pairs of jobs, or draw the paper's figures from results."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(pretty_exceptions_enable=False)

DEFAULT_PAIRS = "rhn+gnmt,nasnet+gnmt,bert+gnmt,nasnet+resnet110"


@app.command()
def zico(
    pairs: Annotated[
        str,
        typer.Option(help="A+B, with commas, or all; NAME@SIZE sets a batch size, small:NAME is for tests."),
    ] = DEFAULT_PAIRS,
    excesses: Annotated[
        str, typer.Option(help="Factors by which both jobs' peaks exceed the budgets, with commas.")
    ] = "1.3,1.8",
    parts: Annotated[str, typer.Option(help="pairs, memory or both.")] = "pairs,memory",
    device: Annotated[str, typer.Option(help="cuda or cpu.", show_default="cuda if there is one")] = "",
    lowering: Annotated[
        str, typer.Option(help="inductor or aten.", show_default="inductor on a GPU, aten on a CPU")
    ] = "",
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    seconds: Annotated[float, typer.Option(min=1e-3, help="Time for each way to run a pair.")] = 1.0,
    eager: Annotated[bool, typer.Option(help="Also measure plain torch.")] = True,
    processes: Annotated[bool, typer.Option(help="Also measure two processes, alone and under MPS.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which nothing more is started.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Results file to write.")] = Path("runs/bench/zico.json"),
    resume: Annotated[bool, typer.Option(help="Keep what the file has and measure the rest.")] = False,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read this results file.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Page whose tables and figures are refreshed from the results.")
    ] = None,
) -> None:
    """Train two jobs on one device: by turns, at once, and co-located inside budgets."""
    import torch

    from . import results
    from .cases import parse_pairs
    from .jobs import ZicoOptions
    from .run import PARTS, ZicoPlan, measure

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [word.strip() for word in parts.split(",")]
    try:
        if read:
            document = results.read(read)
        else:
            factors = [float(word) for word in excesses.split(",") if word.strip()]
            if not all(factor > 1 for factor in factors):
                raise ValueError(f"expected factors above 1, with commas; got {excesses!r}")
            if not set(chosen) <= set(PARTS):
                raise ValueError(f"expected some of {', '.join(PARTS)}; got {parts!r}")
            if where == "cuda" and not torch.cuda.is_available():
                raise ValueError("expected a CUDA device, found none; use --device cpu")
            plan = ZicoPlan(parse_pairs(pairs), factors, chosen, eager, processes, time_limit)
            options = ZicoOptions(
                where, lowering or ("inductor" if where == "cuda" else "aten"), precision, seconds
            )
            document = measure(plan, options, out, command=_command(), resumes=resume, tell=typer.echo)
            if out.exists():
                typer.echo(f"written to {out}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if page is not None:
        from .page import refresh

        for path in refresh(document, page):
            typer.echo(f"written to {path}")
    elif document["pairs"]:
        from .tables import pairs_table

        typer.echo(pairs_table(document).to_string(index=False))


def _command() -> str:
    """Write down how this run was started, without the place of its results."""
    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    return shlex.join(["python", "-m", "benchmarks", *words])
