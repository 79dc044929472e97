"""A search that any number of workers may train: ``trainmux sweep examples/search.py:search --storage URL``.

``examples/slurm.sbatch`` and ``examples/kubernetes.yaml`` start its workers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import trainmux as tm


def make_member(trial: Any) -> tm.Member:
    """One configuration: an MLP with AdamW."""
    torch.manual_seed(trial.number)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    rate = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    return tm.Member(model, torch.optim.AdamW(model.parameters(), lr=rate))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def search() -> dict[str, Any]:
    """The arguments of ``trainmux.optuna.optimize``; the images of scikit-learn's digits."""
    import optuna
    from sklearn.datasets import load_digits

    found = load_digits(return_X_y=True)
    images, labels = torch.tensor(found[0], dtype=torch.float32) / 16, torch.tensor(found[1])
    batches = list(zip(images.split(64), labels.split(64), strict=True))[:-1]
    return {
        "make_member": make_member,
        "loss": loss,
        "loader": batches[:20],
        "validation": batches[20:],
        "metric": "loss",
        "max_epochs": 27,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "study": {"pruner": optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3)},
    }
