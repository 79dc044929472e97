"""The GPU runs the CPU's equivalence suite too: its helpers and models lie beside the CPU tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / "fleet"))
