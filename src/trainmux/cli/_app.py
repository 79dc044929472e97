"""The commands and their options; each command's work is imported when it is called."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from platform import python_version
from typing import Annotated, Any

import typer

app = typer.Typer(name="trainmux", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Budget = Annotated[
    str | None, typer.Option(help='Device bytes: "20GiB", "70%", ...', show_default="what is free")
]


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import torch

    import trainmux

    typer.echo(f"trainmux {trainmux.__version__}, torch {torch.__version__}, Python {python_version()}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit."),
    ] = False,
) -> None:
    """Train many PyTorch models at once, with the same results as training each one alone."""


@app.command()
def demo(
    device: Annotated[DeviceChoice, typer.Option(help="Where to train.")] = DeviceChoice.AUTO,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the best member.")] = Path("runs/demo"),
) -> None:
    """Sweep 16 small CNNs over the digits data set, as one fleet and one by one, and compare."""
    from trainmux.cli.demo import run_demo

    run_demo(device=device.value, epochs=epochs, out=out)


@app.command()
def plan(
    fleet: Annotated[str, typer.Argument(help="FILE:NAME, a trainmux.Fleet or a function that makes one.")],
    budget: Budget = None,
    policy: Annotated[
        str, typer.Option(help="auto, mutwo, mutwo_turns, capuchin, swap_only, recompute_only or none.")
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            help="Another device to plan for: a name such as a100-40gb, or a JSON file with the fields of "
            "trainmux.Device.",
            show_default="the fleet's own, measured",
        ),
    ] = None,
    members: Annotated[
        int | None,
        typer.Option(min=1, help="Plan as if the fleet had so many members.", show_default="as it has"),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds for profiling and search, without compiling.")
    ] = 60.0,
    curve: Annotated[
        int, typer.Option(min=0, help="Also show the step times of so many other budgets (0, or 2 and more).")
    ] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page that shows the plan.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
) -> None:
    """Find the fastest schedule of a fleet within a memory budget, and show it."""
    from trainmux.cli.plan import run_plan

    files = {"save": save, "report": report, "trace": trace}
    how: dict[str, Any] = {"num_members": members, "num_budgets": curve, "time_limit": time_limit}
    run_plan(fleet, device, files, budget=budget, policy=policy, **how)


@app.command()
def colocate(
    jobs: Annotated[
        list[str],
        typer.Argument(help="FILE:NAME each, a trainmux.Job or a function that makes one.", metavar="JOBS"),
    ],
    budget: Budget = None,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the jobs' profiles: next time they need not run alone first."),
    ] = None,
) -> None:
    """Train independent jobs at the same time on one device, within one memory budget.

    Ends with status 1 if a job failed.
    """
    from trainmux.cli.colocate import run_colocate

    result = run_colocate(jobs, budget, profiles)
    raise typer.Exit(1 if result.failed else 0)


@app.command()
def sweep(
    search: Annotated[
        str,
        typer.Argument(
            help="FILE:NAME, a dict of arguments of trainmux.optuna.optimize, or a function that makes one; "
            "its 'study' has arguments of optuna.create_study."
        ),
    ],
    storage: Annotated[
        str | None,
        typer.Option(
            help="Where the study is: the URL of a database, or journal:FILE.", show_default="in memory"
        ),
    ] = None,
    study: Annotated[str, typer.Option(help="Name of the study; made if it is not there.")] = "trainmux",
    slots: Annotated[int | None, typer.Option(min=1, help="Trials that train at the same time.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Configurations in the study, whoever trains them.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which no trial is begun.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for the state of trials, which all workers see.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Processes on this machine; auto: one per visible GPU.")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="This worker's name.", show_default="made up")] = None,
    heartbeat: Annotated[float | None, typer.Option(help="Seconds between a worker's signs of life.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="One worker per GPU of a Ray cluster.")] = False,
    progress: Annotated[
        str | None,
        typer.Option(help="auto, rich, plain or off.", show_default="auto, a live table in a terminal"),
    ] = None,
) -> None:
    """Train trials of an Optuna study, many at a time, alone or beside other workers.

    SIGTERM ends it after the epoch, with everything saved and given back to the study, and with status 143.
    """
    from trainmux.cli.sweep import run_sweep

    options: dict[str, Any] = {
        "slots": slots,
        "total_trials": trials,
        "timeout": timeout,
        "checkpoint": checkpoint,
        "worker": worker,
        "heartbeat": heartbeat,
        "progress": progress,
    }
    given = {name: value for name, value in options.items() if value is not None}
    raise typer.Exit(run_sweep(search, storage, study, given, workers, use_ray=ray))


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the findings here, as JSON.", dir_okay=False, writable=True),
    ] = None,
) -> None:
    """Check this machine for training: what it has, what is missing, what to do about it.

    Ends with status 1 if training cannot work.
    """
    from trainmux.cli.doctor import run_doctor

    raise typer.Exit(0 if run_doctor(quick=quick, json_file=json_file) else 1)
