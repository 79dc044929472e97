"""Step time per member, workloads × ways × widths: the same as ``trainmux bench step``.

    python benchmarks/step_time.py --workloads vit_b16,gpt2 --widths 8 --out benchmarks/results/step.json

For a machine where trainmux is not installed, with ``PYTHONPATH=src``.
"""

from __future__ import annotations

import sys

from trainmux.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "step"]
    main()
