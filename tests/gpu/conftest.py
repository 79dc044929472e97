"""The GPU runs what the CPU's suites run too: their helpers and models lie beside the CPU tests."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("fleet", "engine"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / folder))
