"""Every operator, for every way of stacking its arguments: what each member would compute alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, check, check_everything, ways_to_stack
from torch import Tensor

from trainmux.fusion._stacked import _RULES
from trainmux.fusion.rules import attention
from trainmux.fusion.rules.pointwise import EXTRA

aten = torch.ops.aten
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Make = Callable[[Values], tuple[Any, ...]]


def samples(make: Make, *ops: Any) -> list[Sample]:
    return [Sample(op, make) for op in ops]


# ---- rules of our own ------------------------------------------------------------------------------------

VIEWS = [
    Sample(aten.view.default, lambda v: (v.normal(2, 6), [3, 4])),
    Sample(aten.view.default, lambda v: (v.normal(2, 6), [-1, 2, 2]), "inferred"),
    Sample(aten.view.default, lambda v: (v.normal(), [1, 1]), "scalar"),
    Sample(aten.view.default, lambda v: (v.normal(2, 0, 3), [0, 6]), "empty"),
    Sample(aten._unsafe_view.default, lambda v: (v.normal(4, 3), [2, 6])),
    Sample(aten.reshape.default, lambda v: (v.normal(4, 3), [-1])),
    Sample(aten.squeeze.dim, lambda v: (v.normal(1, 3, 1), -1)),
    Sample(aten.squeeze.dim, lambda v: (v.normal(1, 3, 1), 1), "not one"),
    Sample(aten.squeeze.dims, lambda v: (v.normal(1, 3, 1), [0, -1])),
    Sample(aten.expand.default, lambda v: (v.normal(1, 3), [4, 3])),
    Sample(aten.expand.default, lambda v: (v.normal(2, 1), [3, -1, 5]), "new and kept dimensions"),
    Sample(aten.expand.default, lambda v: (v.normal(), [2, 2]), "scalar"),
    Sample(aten.stack.default, lambda v: ([v.normal(2, 3), v.normal(2, 3)], -1)),
    Sample(aten.stack.default, lambda v: ([v.normal(), v.normal()],), "scalars"),
    Sample(aten.select_scatter.default, lambda v: (v.normal(2, 3), v.normal(3), -2, -1)),
    Sample(aten.slice_scatter.default, lambda v: (v.normal(4, 5), v.normal(4, 2), -1, 0, 4, 2)),
    Sample(aten.slice_scatter.default, lambda v: (v.normal(4), v.normal(4)), "defaults"),
]


def matrices(v: Values, *batch: int) -> tuple[Tensor, Tensor]:
    return v.normal(*batch, 2, 3), v.normal(*batch, 3, 4)


MATMULS = [
    Sample(aten.mm.default, matrices, how="bmm"),
    Sample(aten.mm.default, lambda v: (v.normal(0, 3), v.normal(3, 2)), "empty", how="bmm"),
    Sample(aten.addmm.default, lambda v: (v.normal(4), *matrices(v)), how="bmm"),
    Sample(aten.addmm.default, lambda v: (v.normal(2, 1), *matrices(v)), "column"),
    Sample(aten.addmm.default, lambda v: (v.normal(), *matrices(v)), "scalar"),
    Sample(
        aten.addmm.default, lambda v: (v.normal(4), *matrices(v), {"beta": 0.5, "alpha": -2.0}), "factors"
    ),
    Sample(aten.addmm.default, lambda v: (v.normal(4) * torch.nan, *matrices(v), {"beta": 0.0}), "no bias"),
    Sample(aten.bmm.default, lambda v: matrices(v, 2)),
    Sample(aten.bmm.default, lambda v: matrices(v, 0), "empty"),
    Sample(aten.baddbmm.default, lambda v: (v.normal(1, 2, 1), *matrices(v, 2))),
    Sample(
        aten.baddbmm.default, lambda v: (v.normal(4), *matrices(v, 2), {"beta": 2.0, "alpha": 0.5}), "factors"
    ),
    Sample(aten.mv.default, lambda v: (v.normal(2, 3), v.normal(3))),
    Sample(aten.dot.default, lambda v: (v.normal(3), v.normal(3))),
]


def unsorted(boundaries: Tensor, values: Tensor) -> tuple[Any, ...]:
    return boundaries, values, {"sorter": boundaries.argsort(), "side": "right"}


EMBEDDINGS = [
    Sample(aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5, 2, 4))),
    Sample(aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5, 0)), "no index"),
    Sample(aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5, dtype=torch.int32), 2), "int32"),
    *[
        Sample(
            aten.embedding_dense_backward.default,
            lambda v, p=padding, f=by_frequency: (v.normal(2, 4, 3), v.integers(5, 2, 4), 5, p, f),
            f"padding {padding}, by frequency {by_frequency}",
            how="offset indices, one call",
        )
        for padding, by_frequency in ((-1, False), (0, True), (4, False), (-1, True))
    ],
    Sample(
        aten.embedding_dense_backward.default,
        lambda v: (v.normal(3), v.integers(5, dtype=torch.int32), 5, -1, False),
        "one index",
    ),
    Sample(aten.searchsorted.Tensor, lambda v: (v.normal(5).sort().values, v.normal(2, 3)), how="one call"),
    Sample(aten.searchsorted.Tensor, lambda v: (v.normal(5).sort().values, v.normal()), "scalar"),
    Sample(
        aten.searchsorted.Tensor,
        lambda v: (v.normal(2, 5).sort().values, v.normal(2, 3)),
        "rows",
        kwargs={"right": True, "out_int32": True},
    ),
    Sample(aten.searchsorted.Tensor, lambda v: unsorted(v.normal(5), v.normal(2, 3)), "sorter"),
    Sample(aten.searchsorted.Tensor, lambda v: unsorted(v.normal(2, 5), v.normal(2, 3)), "rows, sorter"),
    *[
        Sample(
            aten.index_add.default,
            lambda v, d=dim: (v.normal(3, 4), d, v.integers((3, 4)[d], 5), v.normal(*((5, 4), (3, 5))[d])),
            f"dim {dim}",
            how="offset indices, one call",
        )
        for dim in (0, -1)
    ],
]


def statistics(v: Values) -> tuple[Tensor, Tensor]:
    return v.normal(2), v.positive(2)


FUNCTIONAL = aten._native_batch_norm_legit_functional.default
# With whether there are weights, whether there are running statistics, and further arguments.
BATCH_NORMS: list[tuple[Any, bool, bool, tuple[Any, ...]]] = [
    (FUNCTIONAL, True, True, (True, 0.1, 1e-5)),
    (FUNCTIONAL, False, True, (True, 0.3, 1e-3)),
    (aten._native_batch_norm_legit_no_training.default, True, True, (0.1, 1e-5)),
    (aten._native_batch_norm_legit.no_stats, True, False, (True, 0.1, 1e-5)),
    (aten.native_batch_norm.default, True, True, (False, 0.1, 1e-5)),
]


def batch_norm(
    shape: tuple[int, ...], op: Any, affine: bool, tracks: bool, numbers: tuple[Any, ...]
) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        weights = (v.normal(2), v.normal(2)) if affine else (None, None)
        return (v.normal(*shape), *weights, *(statistics(v) if tracks else ()), *numbers)

    return Sample(op, make, f"{len(shape)} dimensions, affine {affine}")


def norm_backward(train: bool, mask: list[bool], affine: bool = True) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        weight = v.normal(2) if affine else None
        saved = statistics(v) if train else (None, None)
        return (v.normal(4, 2, 3), v.normal(4, 2, 3), weight, *statistics(v), *saved, train, 1e-5, mask)

    return Sample(aten.native_batch_norm_backward.default, make, f"train {train} {mask} affine {affine}")


def layer_norm(weight: bool, bias: bool, shape: list[int]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        affine = [v.normal(*shape) if given else None for given in (weight, bias)]
        return (v.normal(2, 4, 3), shape, *affine, 1e-5)

    return Sample(aten.native_layer_norm.default, make, f"weight {weight} bias {bias} over {shape}")


def layer_norm_backward(weight: bool, mask: list[bool], shape: list[int]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        x = v.normal(2, 4, 3)
        rows = [*x.shape[: 3 - len(shape)], *[1] * len(shape)]
        affine = (v.normal(*shape), v.normal(*shape)) if weight else (None, None)
        return (v.normal(2, 4, 3), x, shape, v.normal(*rows), v.positive(*rows), *affine, mask)

    return Sample(aten.native_layer_norm_backward.default, make, f"weight {weight} {mask} over {shape}")


NORMS = [
    *[batch_norm(shape, *given) for shape in ((4, 2), (3, 2, 2, 2)) for given in BATCH_NORMS],
    *[norm_backward(True, [wants_input, True, True]) for wants_input in (True, False)],
    norm_backward(True, [True, False, False], affine=False),
    norm_backward(False, [True, False, True]),
    *[layer_norm(weight, bias, [3]) for weight in (True, False) for bias in (True, False)],
    layer_norm(True, True, [2, 4, 3]),
    *[layer_norm_backward(True, [True, True, True], shape) for shape in ([3], [2, 4, 3])],
    layer_norm_backward(True, [False, True, True], [3]),
    layer_norm_backward(True, [True, True, False], [4, 3]),
    layer_norm_backward(False, [True, False, False], [3]),
    Sample(aten._softmax_backward_data.default, lambda v: (v.normal(2, 3, 2), v.positive(2, 3, 2), -2, FP64)),
    Sample(
        aten._softmax_backward_data.default, lambda v: (v.normal(), v.normal().softmax(0), 0, FP64), "scalar"
    ),
    Sample(aten._log_softmax_backward_data.default, lambda v: (v.normal(2, 3), v.normal(2, 3), 0, FP64)),
]


def pool_indices(v: Values) -> tuple[Any, ...]:
    x = v.normal(2, 2, 4, 4)
    _, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    return (v.normal(2, 2, 2, 2), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


MAX_POOL, AVG_POOL = aten.max_pool2d_with_indices.default, aten.avg_pool2d.default
POOLS = [
    Sample(MAX_POOL, lambda v: (v.normal(2, 3, 4, 4), [2, 2])),
    Sample(MAX_POOL, lambda v: (v.normal(2, 3, 5, 5), [3, 2], [2, 1], [1, 1], [1, 2], True), "geometry"),
    Sample(MAX_POOL, lambda v: (v.normal(3, 4, 4), [2, 2]), "no batch"),
    Sample(aten.max_pool2d_with_indices_backward.default, pool_indices),
    Sample(AVG_POOL, lambda v: (v.normal(2, 3, 5, 5), [3, 3], [2, 2], [1, 1], True, False, 7)),
    Sample(
        aten.avg_pool2d_backward.default,
        lambda v: (v.normal(2, 3, 2, 2), v.normal(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    Sample(aten._adaptive_avg_pool2d.default, lambda v: (v.normal(2, 3, 5, 4), [2, 3])),
    Sample(
        aten._adaptive_avg_pool2d_backward.default, lambda v: (v.normal(2, 3, 2, 3), v.normal(2, 3, 5, 4))
    ),
    Sample(aten.upsample_nearest2d.default, lambda v: (v.normal(2, 3, 2, 2), [4, 6], 2.0, 3.0)),
    Sample(aten.upsample_bilinear2d.default, lambda v: (v.normal(2, 3, 2, 2), [4, 6], True)),
]

CHANNELS_LAST = {"memory_format": torch.channels_last}
CONSTANTS = [
    Sample(aten.zeros_like.default, lambda v: (v.normal(2, 3),), how="shared constant"),
    Sample(aten.zeros_like.default, lambda v: (v.normal(2, 3),), "dtype", kwargs={"dtype": torch.int64}),
    Sample(aten.ones_like.default, lambda v: (v.booleans(2, 3, 2, 2),), kwargs=CHANNELS_LAST),
    Sample(aten.empty_like.default, lambda v: (v.normal(2, 3),), unfilled=True),
    Sample(aten.full_like.default, lambda v: (v.normal(), 2.5), how="shared constant"),
    Sample(aten.full_like.default, lambda v: (v.booleans(2), True), "booleans"),
    Sample(aten.new_zeros.default, lambda v: (v.normal(2), [3, 1])),
    Sample(aten.new_ones.default, lambda v: (v.integers(3, 2), [3])),
    Sample(aten.new_empty.default, lambda v: (v.normal(2), [3, 1]), unfilled=True),
    Sample(aten.new_empty_strided.default, lambda v: (v.normal(2), [3, 2], [2, 1]), unfilled=True),
    Sample(aten.new_full.default, lambda v: (v.normal(2), [], 1.5)),
    Sample(aten.new_full.default, lambda v: (v.normal(2), [3], 1), "dtype", kwargs={"dtype": torch.int32}),
    Sample(aten.copy.default, lambda v: (v.normal(2, 3, dtype=FP32), v.normal(3))),
    Sample(aten.copy.default, lambda v: (v.normal(), v.normal()), "scalar"),
    Sample(
        torch.ops.trainmux.random_words.default,
        lambda v: (v.integers(2**40), v.integers(2**40), 3, [2, 5]),
        how="counters",
    ),
]

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def flash(
    op: Any, mask_shape: tuple[int, ...] | None, causal: bool = False, scale: float | None = None
) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        mask = None if mask_shape is None else v.normal(*mask_shape)
        values = [v.normal(*shape) for shape in ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8))]
        named = {"attn_mask": mask, "scale": scale}
        if op is FLASH:
            return (*values, 0.0, causal, named)
        results = FLASH(*values, 0.0, causal, **named)
        return (v.normal(2, 3, 4, 8), *values, *results, 0.0, causal, named)

    label = f"mask {mask_shape} causal {causal} scale {scale}"
    return Sample(op, make, label, "fold model axis into batch")


ATTENTION = [
    flash(FLASH, None, causal=True, scale=0.3),
    *[flash(FLASH, mask) for mask in (None, (4, 5), (1, 1, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5))],
    flash(FLASH_BACKWARD, None, causal=True),
    *[flash(FLASH_BACKWARD, mask) for mask in (None, (4, 5), (2, 1, 4, 5))],
]

# ---- element by element ----------------------------------------------------------------------------------


def pairs(op: Any) -> list[Sample]:
    """Members of equal ranks, of different ranks, and scalars."""
    shapes = {
        "": ((2, 3), (2, 3)),
        "lower rank": ((2, 3), (3,)),
        "higher rank": ((3,), (4, 2, 3)),
        "broadcast": ((2, 1), (1, 3)),
        "scalar": ((2, 3), ()),
        "scalars": ((), ()),
        "empty": ((0, 3), (3,)),
    }
    return [
        Sample(op, lambda v, a=a, b=b: (v.positive(*a), v.positive(*b)), label)
        for label, (a, b) in shapes.items()
    ]


def grad_and_input(v: Values) -> tuple[Any, ...]:
    return v.normal(2, 3), v.normal(2, 3)


# A member's scalar ranks below dimensioned tensors in type promotion. Stacked it has a dimension, and the
# result must still be what it was.
MIXED = "bf16, fp32 scalar"
PROMOTIONS: dict[str, Make] = {
    MIXED: lambda v: (v.normal(2, 3, dtype=BF16), v.normal(dtype=FP32)),
    "fp32 scalar, bf16": lambda v: (v.normal(dtype=FP32), v.normal(2, 3, dtype=BF16)),
    "fp32, fp64 scalar": lambda v: (v.normal(2, 3, dtype=FP32), v.normal(dtype=FP64)),
    "bf16, fp32": lambda v: (v.normal(2, 3, dtype=BF16), v.normal(3, dtype=FP32)),
    "bf16 scalar, fp32 scalar": lambda v: (v.normal(dtype=BF16), v.normal(dtype=FP32)),
    "int64, fp32 scalar": lambda v: (v.integers(9, 2, 3), v.normal(dtype=FP32)),
    "int64 scalar, bf16": lambda v: (v.integers(9), v.normal(2, 3, dtype=BF16)),
    "int32, int64 scalar": lambda v: (v.integers(9, 2, 3, dtype=torch.int32), v.integers(9)),
    "bool, fp32 scalar": lambda v: (v.booleans(2, 3), v.normal(dtype=FP32)),
}


def equal_in_bf16(v: Values) -> tuple[Any, ...]:
    """0.1 in bf16 equals 0.1 in fp32: a comparison rounds the scalar."""
    scalar = v.normal(dtype=FP32)
    return scalar.to(BF16).expand(4).clone(), scalar


POINTWISE = [
    *samples(lambda v: (v.normal(2, 3),), aten.relu.default, aten.round.default, aten.isnan.default),
    *samples(lambda v: (v.normal(2, 3),), aten.lift_fresh_copy.default, aten.clone.default),
    *samples(lambda v: (v.positive(),), aten.log.default, aten.reciprocal.default),
    Sample(aten.pow.Scalar, lambda v: (2.0, v.normal(2, 3))),
    Sample(aten.clamp.default, lambda v: (v.normal(2, 3), -0.5, 0.5)),
    Sample(aten.clone.default, lambda v: (v.normal(2, 3, 2, 2),), "channels last", kwargs=CHANNELS_LAST),
    Sample(aten._to_copy.default, lambda v: (v.normal(2, 3, 2, 2),), kwargs={"dtype": FP32, **CHANNELS_LAST}),
    *pairs(aten.add.Tensor),
    *pairs(aten.div.Tensor),
    Sample(aten.add.Tensor, lambda v: (v.normal(2, 3), v.normal(3)), "alpha", kwargs={"alpha": 0.5}),
    Sample(aten.eq.Tensor, lambda v: (v.integers(3, 4), v.integers(3, 2, 4))),
    Sample(aten.bitwise_and.Tensor, lambda v: (v.booleans(3), v.booleans(2, 3))),
    Sample(aten.where.self, lambda v: (v.booleans(3), v.normal(2, 3), v.normal())),
    Sample(aten.where.self, lambda v: (v.booleans(2, 1), v.normal(), v.normal()), "scalars"),
    Sample(aten.masked_fill.Scalar, lambda v: (v.normal(2, 3), v.booleans(3), -torch.inf)),
    Sample(aten.masked_fill.Scalar, lambda v: (v.normal(), v.booleans(), 1.0), "scalars"),
    Sample(aten.masked_fill.Tensor, lambda v: (v.normal(2, 3), v.booleans(2, 3), v.normal())),
    Sample(aten.lerp.Tensor, lambda v: (v.normal(2, 3), v.normal(2, 3), v.normal(3))),
    Sample(aten.addcdiv.default, lambda v: (v.normal(3), v.normal(2, 3), v.positive())),
    *samples(grad_and_input, aten.tanh_backward.default, aten.sigmoid_backward.default),
    *samples(grad_and_input, aten.silu_backward.default, aten.hardswish_backward.default),
    *samples(grad_and_input, aten.hardsigmoid_backward.default, aten.mish_backward.default),
    Sample(aten.gelu_backward.default, grad_and_input, kwargs={"approximate": "tanh"}),
    Sample(aten.threshold_backward.default, lambda v: (*grad_and_input(v), 0)),
    Sample(aten.leaky_relu_backward.default, lambda v: (*grad_and_input(v), 0.1, False)),
    Sample(aten.elu_backward.default, lambda v: (v.normal(2, 3), 1.5, 1.0, 1.0, False, v.normal(2, 3))),
    Sample(aten.softplus_backward.default, lambda v: (*grad_and_input(v), 1.0, 20.0)),
    Sample(aten.hardtanh_backward.default, lambda v: (*grad_and_input(v), -0.5, 0.5)),
    Sample(aten.log_sigmoid_backward.default, lambda v: (*grad_and_input(v), v.positive(2, 3))),
    Sample(aten._prelu_kernel.default, lambda v: (v.normal(5, 4), v.normal(1, 4))),
    *[Sample(aten.mul.Tensor, make, name) for name, make in PROMOTIONS.items()],
    *[Sample(op, equal_in_bf16, MIXED) for op in (aten.eq.Tensor, aten.lt.Tensor)],
    *[Sample(op, PROMOTIONS[MIXED], MIXED) for op in (aten.div.Tensor, aten.maximum.default)],
    Sample(aten.where.self, lambda v: (v.booleans(2, 3), *PROMOTIONS[MIXED](v)), MIXED),
    Sample(aten.addcmul.default, lambda v: (v.normal(3, dtype=BF16), *PROMOTIONS[MIXED](v)), MIXED),
]

EVERY = VIEWS + MATMULS + EMBEDDINGS + NORMS + POOLS + CONSTANTS + ATTENTION + POINTWISE


@pytest.mark.parametrize("given", EVERY, ids=lambda given: given.name)
def test_a_rule_gives_what_members_compute_alone(given: Sample) -> None:
    check_everything(given)


def test_every_rule_has_a_sample() -> None:
    needs_cuda = set(attention._FORWARD + attention._BACKWARD) - {FLASH, FLASH_BACKWARD}
    convolutions = {aten.convolution.default, aten.convolution_backward.default}  # in a file of their own
    assert (set(_RULES) | EXTRA) - needs_cuda - convolutions <= {given.op for given in EVERY}


# ---- the long tail: torch.vmap of the one operator, or a loop that is on record --------------------------

LONG_TAIL = [
    # Torch's own database has the rest (`tests/cpu/operators`); here is what it does not differentiate,
    # indices that members share or not, arguments left out, and what has to be looped over.
    Sample(aten.gather.default, lambda v: (v.normal(3, 4), 1, v.integers(4, 3, 2))),
    Sample(aten.scatter_add.default, lambda v: (v.normal(3, 4), 1, v.integers(4, 3, 5), v.normal(3, 5))),
    Sample(aten.index.Tensor, lambda v: (v.normal(3, 4), [None, v.integers(4, 2)])),
    Sample(aten.index.Tensor, lambda v: (v.normal(3, 4), [v.integers(3, 2), v.integers(4, 2)]), "pairs"),
    Sample(aten.index_put.default, lambda v: (v.normal(3, 4), [v.integers(3, 2)], v.normal(2, 4), True)),
    Sample(aten.sort.default, lambda v: (v.normal(3, 4), -1)),
    Sample(aten.argmax.default, lambda v: (v.normal(3, 4),)),
    Sample(aten.any.dim, lambda v: (v.booleans(3, 4), -1)),
    Sample(aten.t.default, lambda v: (v.normal(3),), "vector"),
    Sample(aten.slice.Tensor, lambda v: (v.normal(5, 3),), "defaults"),
    Sample(aten.split_with_sizes.default, lambda v: (v.normal(5, 4), [2, 0, 3], -2)),
    Sample(aten.cat.default, lambda v: ([v.normal(0), v.normal(2, 3)],), "legacy empty"),
    Sample(aten.cat.default, lambda v: ([v.normal(2, 3), v.normal(2, 3, dtype=FP32)],), "dtypes"),
    Sample(aten.sum.dim_IntList, lambda v: (v.normal(2, 3), None), "every dimension"),
    Sample(aten.sum.dim_IntList, lambda v: (v.booleans(0, 3), [0]), "empty booleans"),
    Sample(aten.sum.default, lambda v: (v.normal(3, dtype=FP32),), kwargs={"dtype": FP64}),
    Sample(
        aten._safe_softmax.default,
        lambda v: (v.normal(3, 2).masked_fill(torch.tensor([[True], [False], [True]]), -torch.inf), -1),
    ),
    Sample(
        aten.nll_loss_backward.default,
        lambda v: (v.normal(), v.normal(3, 4), v.integers(4, 3), None, 1, -100, v.positive()),
    ),
    Sample(aten._prelu_kernel_backward.default, lambda v: (v.normal(5, 4), v.normal(5, 4), v.normal(1, 4))),
    Sample(aten.as_strided.default, lambda v: (v.normal(4), [2], [2], 1)),
    Sample(aten.as_strided_scatter.default, lambda v: (v.normal(4), v.normal(2), [2], [2], 1)),
    Sample(aten.histc.default, lambda v: (v.normal(20), 5, -2.0, 2.0)),
    Sample(aten._pdist_forward.default, lambda v: (v.normal(4, 3),)),
]


@pytest.mark.parametrize("given", LONG_TAIL, ids=lambda given: given.name)
def test_the_long_tail_gives_what_members_compute_alone_and_loops_are_on_record(given: Sample) -> None:
    """torch.vmap falls back to a loop of its own where it has no rule; that must be said too."""
    assert given.op not in _RULES
    everything, *others = ways_to_stack(given.num_tensors)
    for batched in others:
        check(given, 2, batched)
    narrow, wide = (check(given, width, everything) for width in (2, 5))
    assert narrow.records == wide.records
    (record,) = wide.records
    assert (record.op, record.count) == (str(given.op), 1)
    grows = len(wide.module.graph.nodes) != len(narrow.module.graph.nodes)
    assert record.how == ("loop" if grows else "vmap")
    assert bool(record.fallback) == grows
