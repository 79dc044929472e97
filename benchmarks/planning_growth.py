"""How the time to schedule a pair grows with its nodes and with its feature maps (policy mutwo).

    python benchmarks/planning_growth.py --out planning_growth.json

Chains of layers as in `tests/unit/scheduling/test_mutwo_scale.py`, at 30% of the memory beyond static. The
exponent is that of the line through the logarithms of size and processor time: 2 is quadratic.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "scheduling"))
from test_mutwo_scale import schedule_seconds

SIZES = (1000, 2000, 4000, 8000)
SHARE = 0.3


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of the least-squares line through the logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/planning_growth.json"))
    given = parser.parse_args()
    results: dict[str, Any] = {
        "command": "python benchmarks/planning_growth.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "share": SHARE,
    }
    rows = {
        "nodes, 500 feature maps": [(size, 500) for size in SIZES],
        "feature maps, 16000 nodes": [(16000, size) for size in SIZES],
    }
    for name, cases in rows.items():
        seconds = [schedule_seconds(nodes, maps, SHARE) for nodes, maps in cases]
        results[name] = {
            "sizes": SIZES,
            "cpu_seconds": seconds,
            "exponent": exponent(list(SIZES), seconds),
        }
        print(name, json.dumps(results[name]), flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
