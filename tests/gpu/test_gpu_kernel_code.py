"""Code that was compiled for CUDA is loaded by another process, and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainmux.lowering import compiler_missing

TRAINS = """
import json, sys
import torch
import trainmux as tm
from trainmux.fleet._build import _kernels
from trainmux.lowering._inductor import LoadedCode
from trainmux.workloads import SMALL

small = SMALL["transformer"]
members = []
for number in range(3):
    model = small.build(number).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members.append(tm.Member(model, optimizer, name=str(number), seed=number))
batch = small.batch(0, torch.float32)
fleet = tm.Fleet(members, small.loss, batch, device="cuda", lowering="inductor", deterministic=True)
losses = [fleet.step(batch).tolist() for _ in range(4)]
kernels = list(_kernels(True)._kernels.values())
loaded = sum(isinstance(kernel._compiled, LoadedCode) for kernel in kernels)
compiler = "torch._inductor.compile_fx" in sys.modules
print(json.dumps({"losses": losses, "kernels": len(kernels), "loaded": loaded, "compiler": compiler}))
"""


def test_a_second_start_loads_every_kernel_and_computes_the_same(tmp_path: Path) -> None:
    missing = compiler_missing(torch.device("cuda", 0))
    if missing:
        pytest.skip(missing)
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))

    def train() -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", TRAINS], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found

    first, second = train(), train()
    assert first["loaded"] == 0
    assert second["loaded"] == second["kernels"] == first["kernels"] != 0
    assert not second["compiler"]
    assert second["losses"] == first["losses"]
