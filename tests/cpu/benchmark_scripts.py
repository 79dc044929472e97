"""The scripts of the folder of benchmarks, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def benchmark_script(name: str) -> Any:
    """A script, loaded anew."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
