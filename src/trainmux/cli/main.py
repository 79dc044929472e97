"""Entry point of the command line; names the missing extra before anything else can fail."""

from __future__ import annotations

CLI_PACKAGES = frozenset({"typer", "click", "rich", "sklearn"})


def main() -> None:
    """Run the command line; exit with status 1 on a ``TrainmuxError`` or a missing package of the extra."""
    from trainmux.errors import TrainmuxError

    try:
        from trainmux.cli._app import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in CLI_PACKAGES:
            raise
        raise SystemExit(
            f"trainmux: the command line needs the package '{package}', which is not installed; "
            "install it with: pip install 'trainmux[cli]'"
        ) from None
    except TrainmuxError as error:
        raise SystemExit(f"trainmux: {error}") from None
