"""Every workload trains in plain torch, before anything is fused; only small ones train here."""

from __future__ import annotations

import dataclasses
import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.workloads import FULL_SIZE, SAMPLE, SMALL, SizedWorkload, Workload, huggingface, paper, sample
from benchmarks.workloads.deep_vision import ResNet
from benchmarks.workloads.public import ARCHITECTURES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

NUM_PARAMETERS = {
    "vit_b16": 86_567_656,
    "vit_60m": 60_343_400,
    "mobilenet_v3_large": 5_483_032,
    "resnet101": 44_549_160,
    "bert_base_mlm": 109_514_298,
    "bert_base_nsp": 109_483_778,
    "gpt2": 124_439_808,
    "dlrm": 40_156_801,
    "lstm_translation": 21_225_792,
    "small_cnn": 106_730,
    "mlp": 269_322,
}
"""As published, and within a tenth of Table 1 where it has the model; the same with torchvision."""

every_small = pytest.mark.parametrize("workload", list(SMALL.values()), ids=list(SMALL))
every_large = pytest.mark.parametrize("workload", list(FULL_SIZE.values()), ids=list(FULL_SIZE))


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)


def leaves(batch: object) -> list[Tensor]:
    if dataclasses.is_dataclass(batch):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return pytree.tree_leaves(batch)


def loss_of(workload: Any, model: nn.Module, batch: object) -> Tensor:
    result = workload.loss(model, batch)
    return result[0] if isinstance(result, tuple) else result


@every_small
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


@every_small
def test_small_models_and_batches_depend_on_the_seed_alone(workload: Workload) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (workload.build(seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    drawn, again, other = (leaves(workload.batch(seed, torch.bfloat16)) for seed in (3, 3, 4))
    assert all(leaf.dtype == torch.bfloat16 for leaf in drawn if leaf.is_floating_point())
    assert all(map(torch.equal, drawn, again))
    assert [leaf.shape for leaf in drawn] == [leaf.shape for leaf in other]
    assert not all(map(torch.equal, drawn, other))
    assert torch.equal(torch.random.get_rng_state(), state)
    model, batch = workload.build(0).train(), workload.batch(1, torch.float32)
    with torch.no_grad():
        once, twice = loss_of(workload, model, batch), loss_of(workload, model, batch)
    assert torch.equal(once, twice) != workload.name.endswith("_with_dropout")


def test_the_registry_covers_every_kind_of_batch_and_of_loss() -> None:
    batches = [workload.batch(0, torch.float32) for workload in SMALL.values()]
    assert {type(batch) for batch in batches} >= {tuple, dict}
    assert sum(dataclasses.is_dataclass(batch) for batch in batches) >= 2
    results = [w.loss(w.build(0), batch) for w, batch in zip(SMALL.values(), batches, strict=True)]
    assert sum(isinstance(result, tuple) for result in results) >= 2
    tied, untied = SMALL["lstm"].build(0), SMALL["lstm_untied"].build(0)
    assert tied.projection.weight is tied.embedding.weight
    assert untied.projection.weight is not untied.embedding.weight


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"trainmux\[bench\]"):
        huggingface.tiny_gpt2()


@every_large
def test_size_and_dropout_of_a_large_model(workload: SizedWorkload, no_torchvision: None) -> None:
    with torch.device("meta"):
        model = workload.build(0)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == NUM_PARAMETERS[workload.name.removesuffix("_no_dropout")]
    assert f"{number / 1e6:.1f}M" in workload.note
    assert model.training
    found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    if workload.name.startswith(("bert", "gpt2")):
        assert found == ({0.0} if workload.name.endswith("_no_dropout") else {0.1})
    else:
        assert found <= ({0.2} if workload.name.startswith("mobilenet") else {0.0})


@every_large
def test_large_batches_depend_on_the_seed_alone_and_are_nowhere_constant(workload: SizedWorkload) -> None:
    state = torch.random.get_rng_state()
    size = min(16, workload.batch_sizes[0] // 2)
    first, again, other = (leaves(workload.batch(seed, size)) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    assert all(len(leaf) == size and leaf.unique().numel() > 1 for leaf in first)


# Without numbers: a step of these takes too long here. GPT-2 asks a meta tensor for its values.
@pytest.mark.parametrize(
    "name",
    ["vit_b16", "mobilenet_v3_large", "resnet101", "bert_base_mlm", "gpt2", "dlrm", "lstm_translation"],
)
def test_the_loss_of_a_large_model_takes_its_batch(name: str, no_torchvision: None) -> None:
    workload = FULL_SIZE[name]
    batch = workload.batch(0, 2)
    with FakeTensorMode() if name == "gpt2" else torch.device("meta"):
        model = workload.build(0)
        empty = pytree.tree_map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), batch)
        loss = workload.loss(model, empty)
        loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


SAMPLE_PARAMETERS = {
    "bert_base": 109_514_298,
    "distilbert": 66_985_530,
    "lstm_language": 13_280_400,
    "t5_small": 60_506_624,
    "roberta_prelayernorm": 124_698_201,
    "plbart": 139_220_736,
}


@pytest.mark.parametrize("name", list(SAMPLE_PARAMETERS))
def test_models_of_the_sample_have_published_sizes_and_take_their_batches(name: str) -> None:
    workload = SAMPLE[name]
    with FakeTensorMode():
        model = workload.build(0)
        loss = workload.loss(model, workload.batch(0, 2))
        loss.backward()
    assert sum(parameter.numel() for parameter in model.parameters()) == SAMPLE_PARAMETERS[name]
    assert model.training


def test_four_models_of_the_sample_are_drawn_by_a_seed() -> None:
    """Those left out in between have 632 million, 2.6 billion and 6 billion parameters."""
    names = [architecture.name for architecture in ARCHITECTURES]
    order = [name.split(":")[1] for name in random.Random(30).sample(names, len(names))]
    drawn = [name for name in order if name not in ("ijepa", "gemma2", "gptj")][:4]
    assert tuple(name.replace("-", "_") for name in drawn) == sample.DRAWN
    assert set(sample.DRAWN) < SAMPLE.keys()
    assert len(SAMPLE) == 12


def test_a_torchvision_that_breaks_on_import_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(paper.importlib, "import_module", broken)
    with torch.device("meta"):
        assert isinstance(FULL_SIZE["resnet101"].build(0), ResNet)


def test_text_is_masked_marked_and_skewed_like_text() -> None:
    masked = FULL_SIZE["bert_base_mlm"].batch(0, 24)
    tokens, chosen = masked["input_ids"], masked["labels"] != -100
    assert (chosen.sum(1) == 19).all()  # 15% of 128
    assert (tokens[chosen] == 103).float().mean().item() == pytest.approx(0.8, abs=0.07)
    assert (tokens[~chosen] != 103).all()
    pairs = FULL_SIZE["bert_base_nsp"].batch(0, 16)
    assert (pairs["input_ids"] == 102).sum(1).tolist() == [2] * 16
    words = FULL_SIZE["gpt2"].batch(0, 16)["input_ids"]
    assert 0 <= int(words.min()) <= int(words.max()) < 50257
    assert 0.3 < (words < 100).float().mean().item() < 0.6


def test_categories_of_clicks_are_rows_of_their_tables() -> None:
    sizes = torch.tensor(paper.TABLE_SIZES)
    categories = FULL_SIZE["dlrm"].batch(0, 1024)["categories"]
    assert (categories >= 0).all()
    assert (categories < sizes).all()
    assert (categories.amax(0) == sizes - 1)[sizes < 20].all()
