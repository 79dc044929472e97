"""Code that was compiled for CUDA is loaded by another process, and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainmux.lowering import compiler_missing

TRAINS = """
import json, sys
import torch
import trainmux as tm
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from trainmux.fleet._build import _kernels
from trainmux.lowering._inductor import LoadedCode
from trainmux.workloads import SMALL

deterministic = sys.argv[1] == "deterministic"
tried = []
try_all = CachingAutotuner.autotune_to_one_config
def noted(self, *args, **kwargs):
    tried.append(self.inductor_meta.get("kernel_name"))
    return try_all(self, *args, **kwargs)
CachingAutotuner.autotune_to_one_config = noted

small = SMALL["transformer"]
members = []
for number in range(3):
    model = small.build(number).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members.append(tm.Member(model, optimizer, name=str(number), seed=number))
batch = small.batch(0, torch.float32)
fleet = tm.Fleet(members, small.loss, batch, device="cuda", lowering="inductor", deterministic=deterministic)
losses = [fleet.step(batch).tolist() for _ in range(4)]
kernels = list(_kernels(deterministic)._kernels.values())
loaded = sum(isinstance(kernel._compiled, LoadedCode) for kernel in kernels)
compiler = "torch._inductor.compile_fx" in sys.modules
found = {"losses": losses, "kernels": len(kernels), "loaded": loaded, "compiler": compiler, "tried": tried}
print(json.dumps(found))
"""


def train(folder: Path, mode: str) -> dict[str, Any]:
    missing = compiler_missing(torch.device("cuda", 0))
    if missing:
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINS, mode],
        env=dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_start_loads_every_kernel_and_computes_the_same(tmp_path: Path) -> None:
    first, second = train(tmp_path, "deterministic"), train(tmp_path, "deterministic")
    assert first["loaded"] == 0
    assert second["loaded"] == second["kernels"] == first["kernels"] != 0
    assert not second["compiler"]
    assert second["losses"] == first["losses"]


def test_a_second_start_tries_no_variants_again(tmp_path: Path) -> None:
    first, second = train(tmp_path, "quick"), train(tmp_path, "quick")
    assert first["tried"]
    assert second["tried"] == []
    assert second["losses"] == first["losses"]
