"""Every workload trains in plain torch, before anything is fused."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from benchmarks.workloads import SMALL, Workload, huggingface
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ALL = list(SMALL.values())
IDS = list(SMALL)


def leaves(batch: object) -> list[Tensor]:
    if dataclasses.is_dataclass(batch):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return pytree.tree_leaves(batch)


def loss_of(workload: Workload, model: nn.Module, batch: object) -> Tensor:
    result = workload.loss(model, batch)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("workload", ALL, ids=IDS)
def test_loss_falls_within_twenty_adam_steps_in_fp64(workload: Workload) -> None:
    torch.manual_seed(0)
    model = workload.build(0).double()
    model.train()  # transformers hands its models out in eval mode
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = workload.batch(1, torch.float64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(workload, model, batch)
        assert loss.shape == ()
        assert loss.dtype == torch.float64
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("workload", ALL, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_batch_has_the_given_dtype_and_depends_on_the_seed_alone(
    workload: Workload, dtype: torch.dtype
) -> None:
    first, again, other = (leaves(workload.batch(seed, dtype)) for seed in (3, 3, 4))
    assert all(leaf.dtype == dtype for leaf in first if leaf.is_floating_point())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [leaf.shape for leaf in first] == [leaf.shape for leaf in other]
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("workload", ALL, ids=IDS)
def test_build_depends_on_the_seed_alone_and_leaves_the_callers_random_state(workload: Workload) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (workload.build(seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_dropout_is_zero_unless_the_name_says_so() -> None:
    for name, workload in SMALL.items():
        model = workload.build(0).train()
        torch.manual_seed(1)
        batch = workload.batch(1, torch.float32)
        with torch.no_grad():
            once, twice = loss_of(workload, model, batch), loss_of(workload, model, batch)
        assert torch.equal(once, twice) != name.endswith("_with_dropout"), name


def test_the_registry_covers_every_kind_of_batch_and_of_loss() -> None:
    batches = [workload.batch(0, torch.float32) for workload in ALL]
    assert {type(batch) for batch in batches} >= {tuple, dict}
    assert sum(dataclasses.is_dataclass(batch) for batch in batches) >= 2
    results = [w.loss(w.build(0), batch) for w, batch in zip(ALL, batches, strict=True)]
    assert sum(isinstance(result, tuple) for result in results) >= 2


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = SMALL["lstm"].build(0), SMALL["lstm_untied"].build(0)
    assert tied.projection.weight is tied.embedding.weight
    assert untied.projection.weight is not untied.embedding.weight


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"trainmux\[hf\]"):
        huggingface.tiny_gpt2()
