"""Composite operators that are taken apart our own way give torch's values and gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_tools import (
    AUTOCAST,
    assert_equals_torch,
    assert_outputs_close,
    joint,
    kinds,
    run,
    run_eagerly,
    targets,
)

from trainmux.ir import OutputKind
from trainmux.runtime import WORD_RANGE, random_words

aten = torch.ops.aten


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# ---- attention -------------------------------------------------------------------------------------------

BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 4, 5, 6, 8


class Attention(nn.Module):
    """Query, key and value as parameters, so that their gradients can be compared."""

    def __init__(self, *, key_heads: int = HEADS, queries: int = QUERIES, **options: Any) -> None:
        super().__init__()
        self.query = nn.Parameter(doubles(BATCH, HEADS, queries, SIZE, seed=1))
        self.key = nn.Parameter(doubles(BATCH, key_heads, KEYS, SIZE, seed=2))
        self.value = nn.Parameter(doubles(BATCH, key_heads, KEYS, SIZE, seed=3))
        self.options = options

    def forward(self, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, mask, **self.options)


def reference_attention(model: Attention, mask: Tensor | None, kept: Tensor) -> Tensor:
    """The definition in torch's documentation, with ``kept`` in the place of its dropout."""
    options = model.options
    query, key, value = model.query, model.key, model.value
    if options.get("enable_gqa"):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    factor = options.get("scale") or 1 / math.sqrt(SIZE)
    scores = query @ key.transpose(-2, -1) * factor
    if options.get("is_causal"):
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights * kept / (1 - options["dropout_p"])) @ value


def weighted_sum(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator(4)) > 0.3,
    "bool two-dimensional": torch.rand(QUERIES, KEYS, generator=generator(5)) > 0.3,
    "bool with a blind row": torch.arange(QUERIES)[:, None] > torch.arange(KEYS)[None, :],
    "float": doubles(BATCH, HEADS, QUERIES, KEYS, seed=6),
    "float three-dimensional": doubles(HEADS, QUERIES, KEYS, seed=6),
    "float with -inf": torch.where(torch.eye(QUERIES, KEYS, dtype=torch.bool), -math.inf, 0.5).double(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.7},
    "causal": {"is_causal": True},
    "grouped queries": {"enable_gqa": True, "key_heads": 2},
}


COMBINATIONS = [
    *[(mask, "plain") for mask in MASKS],
    ("bool", "scale"),
    ("float", "grouped queries"),
    ("none", "causal"),
]


def attention_loss(model: Attention, batch: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["mask"])
    return weighted_sum(out), {"out": out}


def assert_attention_with_dropout(model: Attention, mask: Tensor | None) -> None:
    batch = {"mask": mask, "unused": torch.ones(1)}
    traced = joint(model, attention_loss, batch)
    outputs = run(traced, model, batch, seed=7, counter=3)
    shape = [BATCH, HEADS, model.query.shape[2], KEYS]
    words = random_words(torch.tensor(7), torch.tensor(3), 0, shape)
    kept = words < round((1 - model.options["dropout_p"]) * WORD_RANGE)
    assert kept.any()
    assert not kept.all()

    def expected_loss(m: Attention, given: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
        out = reference_attention(m, given["mask"], kept)
        return weighted_sum(out), {"out": out}

    assert_outputs_close(outputs, run_eagerly(model, expected_loss, batch))


@pytest.mark.parametrize(("mask", "options"), COMBINATIONS)
def test_attention_with_dropout_is_softmax_attention_with_an_explicit_mask(mask: str, options: str) -> None:
    assert_attention_with_dropout(Attention(dropout_p=0.4, **OPTIONS[options]), MASKS[mask])


@pytest.mark.parametrize("queries", [3, 9])
def test_causal_attention_with_dropout_where_lengths_differ(queries: int) -> None:
    assert_attention_with_dropout(Attention(dropout_p=0.4, is_causal=True, queries=queries), None)


@pytest.mark.parametrize(
    ("mask", "options"),
    [("bool with a blind row", "plain"), ("float three-dimensional", "scale"), ("none", "grouped queries")],
)
def test_attention_without_dropout_is_torchs(mask: str, options: str) -> None:
    batch = {"mask": MASKS[mask], "unused": torch.ones(1)}
    assert_equals_torch(Attention(**OPTIONS[options]), attention_loss, batch)


def test_multihead_attention_module_with_dropout_off_is_torchs() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return weighted_sum(m(x, x, x, need_weights=False)[0])

    assert_equals_torch(model, loss, doubles(2, 5, 8))


def test_attention_with_dropout_under_autocast_multiplies_in_bf16() -> None:
    model = Attention(dropout_p=0.5).float()
    traced = joint(model, attention_loss, {"mask": None, "unused": torch.ones(1)}, AUTOCAST)
    products = [node for node in traced.module.graph.nodes if node.target == aten.bmm.default]
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


# ---- embedding bags --------------------------------------------------------------------------------------

NUM_ROWS, ROW_SIZE = 6, 3
RECTANGLE = torch.tensor([[0, 1, 1], [2, 5, 0], [5, 5, 5], [3, 4, 1]])
FLAT = torch.tensor([0, 1, 1, 2, 5, 0, 5, 5, 3])
OFFSETS = torch.tensor([0, 3, 3, 6])  # the second bag is empty


class Bags(nn.Module):
    def __init__(self, weighted: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(NUM_ROWS, ROW_SIZE, dtype=torch.float64, **options)
        with torch.no_grad():
            self.bag.weight.copy_(doubles(NUM_ROWS, ROW_SIZE, seed=8))
        self.scales = nn.Parameter(doubles(FLAT.numel(), seed=9)) if weighted else None

    def forward(self, indices: Tensor, offsets: Tensor | None) -> Tensor:
        scales = self.scales
        if scales is not None and indices.dim() == 2:
            scales = scales.repeat(2)[: indices.numel()].view(indices.shape)
        return self.bag(indices, offsets, per_sample_weights=scales)


def bag_loss(model: Bags, batch: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["indices"], batch["offsets"])
    return weighted_sum(out), {"out": out}


LAYOUTS: dict[str, tuple[dict[str, Tensor | None], dict[str, Any]]] = {
    "rectangle": ({"indices": RECTANGLE, "offsets": None}, {}),
    "offsets": ({"indices": FLAT, "offsets": OFFSETS}, {}),
    "last offset": (
        {"indices": FLAT, "offsets": torch.cat([OFFSETS, torch.tensor([FLAT.numel()])])},
        {"include_last_offset": True},
    ),
    "last offset before the end": (
        {"indices": FLAT, "offsets": torch.tensor([0, 3, 3, 6, 8])},
        {"include_last_offset": True},
    ),
    "one bag": ({"indices": FLAT, "offsets": torch.tensor([0])}, {}),
    "int32": ({"indices": FLAT.int(), "offsets": OFFSETS.int()}, {}),
}


@pytest.mark.parametrize(
    ("mode", "layout", "padding", "extra"),
    [
        *[("mean", layout, None, "") for layout in LAYOUTS],
        *[("max", layout, 5, "") for layout in ("rectangle", "offsets")],
        ("sum", "rectangle", -1, "weighted"),
        ("sum", "offsets", 5, "weighted"),
        ("sum", "offsets", None, "sparse"),
    ],
)
def test_embedding_bags_are_torchs(mode: str, layout: str, padding: int | None, extra: str) -> None:
    batch, options = LAYOUTS[layout]
    settings = {"mode": mode, "padding_idx": padding, "sparse": extra == "sparse"}
    model = Bags(extra == "weighted", **settings, **options)
    traced = assert_equals_torch(model, bag_loss, batch)
    assert not any("embedding_bag" in str(target) for target in targets(traced))


@pytest.mark.parametrize(("mode", "layout"), [("sum", "rectangle"), ("mean", "offsets")])
def test_embedding_bags_scale_gradients_by_frequency(mode: str, layout: str) -> None:
    """Held to the documentation: torch's own kernel on a CPU looks up the frequency of another row."""
    batch, options = LAYOUTS[layout]
    model = Bags(False, mode=mode, scale_grad_by_freq=True, **options)
    got = run(joint(model, bag_loss, batch), model, batch)[OutputKind.GRADIENT, "bag.weight"]
    plain = run_eagerly(Bags(False, mode=mode, **options), bag_loss, batch)[OutputKind.GRADIENT, "bag.weight"]
    frequency = torch.bincount(batch["indices"].flatten(), minlength=NUM_ROWS).clamp(min=1)
    torch.testing.assert_close(got, plain / frequency.unsqueeze(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("padding", "option"), [(None, "scale_grad_by_freq"), (2, ""), (2, "sparse")])
def test_embeddings_are_torchs(padding: int | None, option: str) -> None:
    model = nn.Embedding(6, 3, padding, **({option: True} if option else {})).double()
    assert_equals_torch(model, lambda m, x: weighted_sum(m(x)), RECTANGLE)


# ---- batch norm ------------------------------------------------------------------------------------------


NORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.3},
    "cumulative": {"momentum": None},
    "no statistics": {"track_running_stats": False},
    "no affine": {"affine": False},
    "neither": {"affine": False, "track_running_stats": False},
    "eps": {"eps": 0.1},
}


@pytest.mark.parametrize(
    ("dimensions", "name", "training"),
    [
        (1, "plain", False),
        (3, "plain", True),
        (2, "neither", False),
        *[(2, name, True) for name in NORMS],
    ],
)
def test_batch_norm_is_torchs(dimensions: int, name: str, training: bool) -> None:
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    torch.manual_seed(0)
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions](2, 3, 1, bias=False)
    model = nn.Sequential(conv, norm(3, **NORMS[name])).double()
    for parameter in model[1].parameters():
        nn.init.normal_(parameter)
    x = doubles(4, 2, *[3] * dimensions)
    model(x * 2 + 1)  # the statistics are not those of a new module, nor those of this batch
    model.train(training)
    traced = assert_equals_torch(model, lambda m, v: weighted_sum(m(v)), x)
    changed = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    tracks = training and NORMS[name].get("track_running_stats", True)
    assert set(kinds(traced, OutputKind.BUFFER)) == (changed if tracks else set())


def test_cumulative_batch_norm_over_several_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)).double()
    plain = copy.deepcopy(model)
    batches = [doubles(4, 3, seed=seed) for seed in range(4)]
    traced = joint(model, lambda m, v: weighted_sum(m(v)), batches[0])
    for x in batches:
        plain(x)
        outputs = run(traced, model, x)
        for (kind, name), value in outputs.items():
            if kind is OutputKind.BUFFER:
                model.get_buffer(name).copy_(value)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.LayerNorm(5)])
def test_other_norms_are_torchs(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), norm).double()
    assert_equals_torch(model, lambda m, v: weighted_sum(m(v)), doubles(3, 2, 5))
