"""``python -m benchmarks``: every benchmark by name."""

from __future__ import annotations

import typer

from benchmarks import (
    adapters,
    chaos,
    claims,
    overhead,
    plans,
    refill,
    report,
    search,
    step,
    storages,
    studies,
    zoo,
)
from benchmarks.mutwo import command as mutwo
from benchmarks.zico import command as zico

app = typer.Typer(
    name="benchmarks", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command("step")(step.command)
app.command("plans")(plans.command)
app.command("zoo")(zoo.command)
app.command("overhead")(overhead.command)
app.command("adapters")(adapters.command)
app.command("search")(search.command)
app.command("studies")(studies.command)
app.command("storages")(storages.command)
app.command("chaos")(chaos.command)
app.command("mutwo")(mutwo.command)
app.command("refill")(refill.command)
app.command("report")(report.command)
app.command("claims")(claims.command)
app.command("zico")(zico.command)


if __name__ == "__main__":
    app()
