"""Importing the package is quick: no extra, and nothing heavy beside torch."""

import subprocess
import sys

LATE = (
    *("sympy", "scipy.optimize", "torch._dynamo", "torch._inductor.compile_fx"),
    *("rich", "typer", "sklearn", "pandas", "matplotlib", "plotly", "transformers", "peft"),
    *("optuna", "ray", "lightning", "wandb", "mlflow", "tensorboard"),
)


def test_an_import_brings_in_nothing_that_is_needed_late_or_optional() -> None:
    code = f"import sys, trainmux; print(*(name for name in {LATE!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
