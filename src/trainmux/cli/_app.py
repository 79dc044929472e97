"""The commands and their options; each command's work is imported when it is called."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from ._device import DeviceChoice

app = typer.Typer(name="trainmux", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed as a package)"


def _print_version(wanted: bool) -> None:
    if wanted:
        python = platform.python_version()
        typer.echo(f"trainmux {_installed('trainmux')}, torch {_installed('torch')}, Python {python}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit."),
    ] = False,
) -> None:
    """Train many PyTorch models at once, each with the numbers it would have alone."""


@app.command()
def demo(
    device: Annotated[DeviceChoice, typer.Option(help="Where to train.")] = DeviceChoice.AUTO,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder for the best member.")] = Path("runs/demo"),
) -> None:
    """Sweep 16 small CNNs over the digits data set, fused, then one by one, and compare."""
    from trainmux.cli.demo import DeviceUnavailableError, run_demo

    try:
        run_demo(device=device.value, epochs=epochs, out=out)
    except DeviceUnavailableError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None


@app.command()
def plan(
    workload: Annotated[str, typer.Argument(help="A full-size workload by name, or small:NAME.")],
    budget: Annotated[
        str | None, typer.Option(help='Device bytes: "20GiB", "70%", ...', show_default="the whole device")
    ] = None,
    members: Annotated[int, typer.Option(min=1, help="Models to train at once.")] = 8,
    policy: Annotated[
        str, typer.Option(help="auto, mutwo, capuchin, swap_only, recompute_only or none.")
    ] = "auto",
    device: Annotated[
        str,
        typer.Option(
            help='Where to train: "here", measured; a device by name such as a100-40gb; or a JSON file with '
            "the numbers of one (the fields of trainmux.Device)."
        ),
    ] = "here",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of each member.", show_default="the workload's usual one")
    ] = None,
    curve: Annotated[
        int, typer.Option(min=0, help="Also say what so many other budgets would cost (0, or 2 and more).")
    ] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page that shows it.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
) -> None:
    """Find the quickest schedule of several models within a byte budget, and show it."""
    from trainmux.cli.plan import PlanOptions, UnknownWorkloadError, run_plan

    options = PlanOptions(workload, members, batch_size, budget, policy, device, curve, save, report, trace)
    try:
        run_plan(options)
    except UnknownWorkloadError as error:
        raise typer.BadParameter(str(error), param_hint="WORKLOAD") from None


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all of it here, as JSON.")
    ] = None,
) -> None:
    """Say what this machine has for training, what is missing, and what to do about it.

    Ends with status 1 where training cannot work.
    """
    from trainmux.cli.doctor import UnwritableFileError, run_doctor

    try:
        can_train = run_doctor(quick=quick, json_file=json_file)
    except UnwritableFileError as error:
        raise typer.BadParameter(str(error), param_hint="--json") from None
    raise typer.Exit(0 if can_train else 1)


@app.command()
def colocate(
    jobs: Annotated[
        list[str],
        typer.Argument(help="FILE:NAME each, a trainmux.Job or a function that makes one.", metavar="JOBS"),
    ],
    budget: Annotated[
        str | None, typer.Option(help='Bytes for all jobs: "20GiB", "70%", ...', show_default="all there is")
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder for what is learned of the jobs: next time they need not run alone first."),
    ] = None,
) -> None:
    """Train independent jobs side by side on one device, within one byte budget.

    Ends with status 1 where a job ended with an error.
    """
    from trainmux.cli.colocate import UnknownJobError, run_colocate

    try:
        result = run_colocate(jobs, budget, profiles)
    except UnknownJobError as error:
        raise typer.BadParameter(str(error), param_hint="JOBS") from None
    raise typer.Exit(1 if result.failed else 0)
