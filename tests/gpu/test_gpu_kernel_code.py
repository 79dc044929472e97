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
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from trainmux.fleet._build import _kernels
from trainmux.lowering._inductor import LoadedCode
from benchmarks.workloads import SMALL

tried = []
try_all = CachingAutotuner.autotune_to_one_config
def noted(self, *args, **kwargs):
    tried.append((self.inductor_meta.get("kernel_name"), bool(self.save_cache_hook)))
    return try_all(self, *args, **kwargs)
CachingAutotuner.autotune_to_one_config = noted

def losses(build, loss, batch, deterministic):
    members = []
    for number in range(3):
        model = build(number).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        members.append(tm.Member(model, optimizer, name=str(number), seed=number))
    fleet = tm.Fleet(members, loss, batch, device="cuda", lowering="inductor", deterministic=deterministic)
    return [fleet.step(batch).tolist() for _ in range(3)]

small = SMALL["mlp"]
found = {"losses": losses(small.build, small.loss, small.batch(0, torch.float32), True)}
kernels = list(_kernels(True)._kernels.values())
found["kernels"] = len(kernels)
found["loaded"] = sum(isinstance(kernel._compiled, LoadedCode) for kernel in kernels)
found["compiler"] = "torch._inductor.compile_fx" in sys.modules

# A loss over many words is a wide reduction in many blocks, of which Inductor tries a narrower one too.
def build(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(30000, 32), torch.nn.Linear(32, 30000))
def loss(model, words):
    return torch.nn.functional.cross_entropy(model(words), words)
words = torch.randint(30000, (4096,), generator=torch.Generator().manual_seed(0))
tried.clear()
found["of words"] = losses(build, loss, words, False)
found["tried"] = tried
print(json.dumps(found))
"""


def test_a_second_start_loads_every_kernel_tries_nothing_again_and_computes_the_same(tmp_path: Path) -> None:
    if missing := compiler_missing(torch.device("cuda", 0)):
        pytest.skip(missing)
    starts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", TRAINS],
            env=dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = starts
    assert first["loaded"] == 0
    assert second["loaded"] == second["kernels"] == first["kernels"] != 0
    assert not second["compiler"]
    assert second["losses"] == first["losses"]
    # Inductor may keep all that was chosen here by itself.
    if not all(is_kept_by_inductor for _, is_kept_by_inductor in first["tried"]):
        assert second["tried"] == []
        assert second["of words"] == first["of words"]
