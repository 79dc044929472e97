"""Composite operators that are taken apart our own way give torch's values and gradients."""

from __future__ import annotations

import importlib
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
    doubles,
    forward,
    joint,
    kinds,
    run,
    run_eagerly,
    targets,
    weighted_sum,
)

from trainmux.ir import OutputKind
from trainmux.runtime import WORD_RANGE, random_words

aten = torch.ops.aten


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return weighted_sum(model(x))


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
    query, key, value = model.query, model.key, model.value
    if model.options.get("enable_gqa"):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-2, -1) * (model.options.get("scale") or 1 / math.sqrt(SIZE))
    if model.options.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights * kept / (1 - model.options["dropout_p"])) @ value


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": doubles(BATCH, 1, QUERIES, KEYS, seed=4) > -0.5,
    "bool two-dimensional": doubles(QUERIES, KEYS, seed=5) > -0.5,
    "bool with a blind row": torch.arange(QUERIES)[:, None] > torch.arange(KEYS)[None, :],
    "float": doubles(BATCH, HEADS, QUERIES, KEYS, seed=6),
    "float three-dimensional": doubles(HEADS, QUERIES, KEYS, seed=6),
    "float with -inf": torch.where(torch.eye(QUERIES, KEYS, dtype=torch.bool), -math.inf, 0.5).double(),
}
SCALED, GROUPED = {"scale": -0.7}, {"enable_gqa": True, "key_heads": 2}


def attention_loss(model: Attention, batch: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["mask"])
    return weighted_sum(out), {"out": out}


def attention_batch(mask: str) -> dict[str, Tensor | None]:
    return {"mask": MASKS[mask], "unused": torch.ones(1)}


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        *[(mask, {}) for mask in MASKS],
        ("bool", SCALED),
        ("float", GROUPED),
        *[("none", {"is_causal": True, "queries": queries}) for queries in (3, 5, 9)],
    ],
)
def test_attention_with_dropout_is_softmax_attention_with_an_explicit_mask(
    mask: str, options: dict[str, Any]
) -> None:
    model, batch = Attention(dropout_p=0.4, **options), attention_batch(mask)
    outputs = run(joint(model, attention_loss, batch), model, batch, seed=7, counter=3)
    words = random_words(torch.tensor(7), torch.tensor(3), 0, [BATCH, HEADS, model.query.shape[2], KEYS])
    kept = words < round(0.6 * WORD_RANGE)
    assert kept.any()
    assert not kept.all()

    def expected_loss(m: Attention, given: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
        out = reference_attention(m, given["mask"], kept)
        return weighted_sum(out), {"out": out}

    assert_outputs_close(outputs, run_eagerly(model, expected_loss, batch))


def test_attention_with_dropout_under_autocast_multiplies_in_bf16() -> None:
    traced = joint(Attention(dropout_p=0.5).float(), attention_loss, attention_batch("none"), AUTOCAST)
    products = traced.module.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


# ---- embeddings and embedding bags -----------------------------------------------------------------------

NUM_ROWS, ROW_SIZE = 6, 3
RECTANGLE = torch.tensor([[0, 1, 1], [2, 5, 0], [5, 5, 5], [3, 4, 1]])
FLAT = torch.tensor([0, 1, 1, 2, 5, 0, 5, 5, 3])
OFFSETS = torch.tensor([0, 3, 3, 6])  # the second bag is empty
LAYOUTS: dict[str, tuple[Tensor, Tensor | None]] = {
    "rectangle": (RECTANGLE, None),
    "offsets": (FLAT, OFFSETS),
    "last offset": (FLAT, torch.tensor([0, 3, 3, 6, 9])),
    "last offset before the end": (FLAT, torch.tensor([0, 3, 3, 6, 8])),
    "one bag": (FLAT, torch.tensor([0])),
    "int32": (FLAT.int(), OFFSETS.int()),
}


class Bags(nn.Module):
    def __init__(self, layout: str, *, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        includes_last = layout.startswith("last")
        weight = doubles(NUM_ROWS, ROW_SIZE, seed=8)
        self.bag = nn.EmbeddingBag(
            NUM_ROWS, ROW_SIZE, _weight=weight, include_last_offset=includes_last, **options
        )
        indices = LAYOUTS[layout][0]
        self.scales = nn.Parameter(doubles(*indices.shape, seed=9)) if weighted else None

    def forward(self, indices: Tensor, offsets: Tensor | None) -> Tensor:
        return self.bag(indices, offsets, per_sample_weights=self.scales)


def bag_loss(model: Bags, batch: tuple[Tensor, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(*batch)
    return weighted_sum(out), {"out": out}


@pytest.mark.parametrize(
    ("mode", "layout", "options"),
    [
        *[("mean", layout, {}) for layout in LAYOUTS],
        *[("max", layout, {"padding_idx": 5}) for layout in ("rectangle", "offsets")],
        ("sum", "rectangle", {"padding_idx": -1, "weighted": True}),
        ("sum", "offsets", {"padding_idx": 5, "weighted": True}),
        ("sum", "offsets", {"sparse": True}),
    ],
)
def test_embedding_bags_are_torchs(mode: str, layout: str, options: dict[str, Any]) -> None:
    traced = assert_equals_torch(Bags(layout, mode=mode, **options), bag_loss, LAYOUTS[layout])
    assert not any("embedding_bag" in str(target) for target in targets(traced.module))


@pytest.mark.parametrize(("mode", "layout"), [("sum", "rectangle"), ("mean", "offsets")])
def test_embedding_bags_scale_gradients_by_frequency(mode: str, layout: str) -> None:
    """Held to the documentation: torch's own kernel on a CPU looks up the frequency of another row."""
    batch, key = LAYOUTS[layout], (OutputKind.GRADIENT, "bag.weight")
    model = Bags(layout, mode=mode, scale_grad_by_freq=True)
    got = run(joint(model, bag_loss, batch), model, batch)[key]
    plain = run_eagerly(Bags(layout, mode=mode), bag_loss, batch)[key]
    frequency = torch.bincount(batch[0].flatten(), minlength=NUM_ROWS).clamp(min=1)
    torch.testing.assert_close(got, plain / frequency.unsqueeze(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("padding", "option"), [(None, "scale_grad_by_freq"), (2, ""), (2, "sparse")])
def test_embeddings_are_torchs(padding: int | None, option: str) -> None:
    model = nn.Embedding(6, 3, padding, **({option: True} if option else {})).double()
    assert_equals_torch(model, summed, RECTANGLE)


# ---- norms -----------------------------------------------------------------------------------------------

NORMS: list[tuple[type[nn.Module], dict[str, Any], bool]] = [
    (nn.BatchNorm1d, {}, False),
    (nn.BatchNorm3d, {}, True),
    (nn.BatchNorm2d, {"affine": False, "track_running_stats": False}, False),
    (nn.BatchNorm2d, {}, True),
    (nn.BatchNorm2d, {"momentum": 0.3}, True),
    (nn.BatchNorm2d, {"momentum": None}, True),  # a cumulative average
    (nn.BatchNorm2d, {"track_running_stats": False}, True),
    (nn.BatchNorm2d, {"affine": False, "eps": 0.1}, True),
    (nn.BatchNorm2d, {"affine": False, "track_running_stats": False}, True),
]


@pytest.mark.parametrize(("norm", "options", "training"), NORMS)
def test_batch_norm_is_torchs(norm: type[nn.Module], options: dict[str, Any], training: bool) -> None:
    dims = int(norm.__name__[-2])
    torch.manual_seed(0)
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](2, 3, 1, bias=False)
    model = nn.Sequential(conv, norm(3, **options)).double()
    for parameter in model[1].parameters():
        nn.init.normal_(parameter)
    x = doubles(4, 2, *[3] * dims)
    model(x * 2 + 1)  # the statistics are not those of a new module, nor those of this batch
    model.train(training)
    traced = assert_equals_torch(model, summed, x)
    model(x * 3 - 1)  # a cumulative average, too, is over what has been seen by now
    assert_outputs_close(run(traced, model, x), run_eagerly(model, summed, x))
    changed = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    tracks = training and options.get("track_running_stats", True)
    assert set(kinds(traced, OutputKind.BUFFER)) == (changed if tracks else set())


# ---- recurrent layers, unrolled into cell steps; their numbers are compared in ``operators`` ---------------


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_vendor_kernel_of_a_recurrent_layer_is_in_the_graph(layer: type[nn.Module]) -> None:
    """They lurk where the input needs no gradient, in single precision and in evaluation."""
    for trace in (joint, forward):
        traced = trace(layer(3, 4, bidirectional=True), lambda m, x: m(x)[0].sum(), torch.ones(2, 2, 3))
        names = map(str, targets(traced.module))
        assert [name for name in names if "_rnn" in name or "mkldnn" in name] == []


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_are_torchs(cell: type[nn.Module]) -> None:
    def unrolled(m: nn.Module, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m(step, state)
        parts = state if isinstance(state, tuple) else (state,)
        return sum(part.square().sum() for part in parts)

    torch.manual_seed(0)
    assert_equals_torch(cell(3, 4).double(), unrolled, doubles(2, 2, 3))


# ---- scans -----------------------------------------------------------------------------------------------


class Scan(nn.Module):
    """A linear recurrence: an associative scan where code is compiled, as in Mamba, else a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.enter = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        keep, enter = torch.sigmoid(self.keep(x)), self.enter(x)
        if torch.compiler.is_compiling():
            # What the public function calls on a GPU.
            scan = importlib.import_module("torch._higher_order_ops.associative_scan").associative_scan_op
            _, states = scan(
                lambda a, b, c, d: (a * c, b * c + d), [keep.movedim(1, 0), enter.movedim(1, 0)], ()
            )
            return states.movedim(0, 1)
        states = [enter[:, 0]]
        for time in range(1, x.shape[1]):
            states.append(keep[:, time] * states[-1] + enter[:, time])
        return torch.stack(states, 1)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_associative_scans_are_taken_apart(length: int) -> None:
    assert_equals_torch(Scan(), summed, doubles(2, length, 4))
