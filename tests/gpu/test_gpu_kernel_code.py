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
from benchmarks.workloads import SMALL

deterministic = sys.argv[1] == "deterministic"
tried = []
try_all = CachingAutotuner.autotune_to_one_config
def noted(self, *args, **kwargs):
    tried.append((self.inductor_meta.get("kernel_name"), bool(self.save_cache_hook)))
    return try_all(self, *args, **kwargs)
CachingAutotuner.autotune_to_one_config = noted

if deterministic:
    small = SMALL["transformer"]
    build, loss, batch = small.build, small.loss, small.batch(0, torch.float32)
else:
    # A loss over many words is a wide reduction in many blocks, of which Inductor tries a narrower one too.
    def build(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Embedding(30000, 32), torch.nn.Linear(32, 30000))
    def loss(model, words):
        return torch.nn.functional.cross_entropy(model(words), words)
    batch = torch.randint(30000, (4096,), generator=torch.Generator().manual_seed(0))
members = []
for number in range(3):
    model = build(number).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members.append(tm.Member(model, optimizer, name=str(number), seed=number))
fleet = tm.Fleet(members, loss, batch, device="cuda", lowering="inductor", deterministic=deterministic)
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
    if all(is_kept_by_inductor for _, is_kept_by_inductor in first["tried"]):
        pytest.skip("Inductor keeps all that was chosen here by itself")
    assert second["tried"] == []
    assert second["losses"] == first["losses"]
