"""Every rule, for every way of stacking its arguments: what each member would compute alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, check_everything, sample
from torch import Tensor

from trainmux.fusion import _stacked
from trainmux.fusion.rules import attention

aten = torch.ops.aten

VIEWS = [
    sample(aten.view.default, lambda v: (v.normal(2, 6), [3, 4])),
    sample(aten.view.default, lambda v: (v.normal(2, 6), [-1, 2, 2]), "inferred"),
    sample(aten.view.default, lambda v: (v.normal(), [1, 1]), "scalar"),
    sample(aten.view.default, lambda v: (v.normal(1, 1), []), "to scalar"),
    sample(aten.view.default, lambda v: (v.normal(2, 0, 3), [0, 6]), "empty"),
    sample(aten._unsafe_view.default, lambda v: (v.normal(4, 3), [2, 6])),
    sample(aten.reshape.default, lambda v: (v.normal(4, 3), [-1])),
    sample(aten.transpose.int, lambda v: (v.normal(2, 3, 4), 0, 2)),
    sample(aten.transpose.int, lambda v: (v.normal(2, 3, 4), -1, 1), "negative"),
    sample(aten.transpose.int, lambda v: (v.normal(), 0, -1), "scalar"),
    sample(aten.t.default, lambda v: (v.normal(2, 3),)),
    sample(aten.t.default, lambda v: (v.normal(3),), "vector"),
    sample(aten.t.default, lambda v: (v.normal(),), "scalar"),
    sample(aten.permute.default, lambda v: (v.normal(2, 3, 4), [2, 0, 1])),
    sample(aten.permute.default, lambda v: (v.normal(2, 3, 4), [-1, -3, -2]), "negative"),
    sample(aten.permute.default, lambda v: (v.normal(), []), "scalar"),
    sample(aten.unsqueeze.default, lambda v: (v.normal(2, 3), 0)),
    sample(aten.unsqueeze.default, lambda v: (v.normal(2, 3), 2), "last"),
    sample(aten.unsqueeze.default, lambda v: (v.normal(2, 3), -1), "negative"),
    sample(aten.unsqueeze.default, lambda v: (v.normal(2, 3), -3), "negative first"),
    sample(aten.unsqueeze.default, lambda v: (v.normal(), 0), "scalar"),
    sample(aten.unsqueeze.default, lambda v: (v.normal(), -1), "scalar negative"),
    sample(aten.squeeze.dim, lambda v: (v.normal(1, 3, 1), 0)),
    sample(aten.squeeze.dim, lambda v: (v.normal(1, 3, 1), -1), "negative"),
    sample(aten.squeeze.dim, lambda v: (v.normal(1, 3, 1), 1), "not one"),
    sample(aten.squeeze.dims, lambda v: (v.normal(1, 3, 1), [0, -1])),
    sample(aten.squeeze.default, lambda v: (v.normal(1, 3, 1),)),
    sample(aten.squeeze.default, lambda v: (v.normal(1, 1),), "to scalar"),
    sample(aten.expand.default, lambda v: (v.normal(1, 3), [4, 3])),
    sample(aten.expand.default, lambda v: (v.normal(3), [2, 4, 3]), "new dimensions"),
    sample(aten.expand.default, lambda v: (v.normal(2, 1), [-1, 5]), "kept"),
    sample(aten.expand.default, lambda v: (v.normal(), [2, 2]), "scalar"),
    sample(aten.select.int, lambda v: (v.normal(2, 3, 4), 1, 2)),
    sample(aten.select.int, lambda v: (v.normal(2, 3, 4), -1, -2), "negative"),
    sample(aten.select.int, lambda v: (v.normal(3), 0, 1), "to scalar"),
    sample(aten.slice.Tensor, lambda v: (v.normal(5, 3), 0, 1, 4)),
    sample(aten.slice.Tensor, lambda v: (v.normal(5, 3), -2, -4, -1, 2), "negative"),
    sample(aten.slice.Tensor, lambda v: (v.normal(5, 3), 1, 0, 2**63 - 1), "to the end"),
    sample(aten.slice.Tensor, lambda v: (v.normal(5, 3),), "defaults"),
    sample(aten.slice.Tensor, lambda v: (v.normal(5), 0, 3, 2), "empty"),
    sample(aten.split.Tensor, lambda v: (v.normal(5, 4), 2)),
    sample(aten.split.Tensor, lambda v: (v.normal(5, 4), 3, -1), "negative"),
    sample(aten.split_with_sizes.default, lambda v: (v.normal(5, 4), [1, 3], 1)),
    sample(aten.split_with_sizes.default, lambda v: (v.normal(5, 4), [2, 0, 3], -2), "negative"),
    sample(aten.unbind.int, lambda v: (v.normal(3, 2),)),
    sample(aten.unbind.int, lambda v: (v.normal(3, 2), -1), "negative"),
    sample(aten.unbind.int, lambda v: (v.normal(3),), "to scalars"),
    sample(aten.cat.default, lambda v: ([v.normal(2, 3), v.normal(1, 3)],)),
    sample(aten.cat.default, lambda v: ([v.normal(2, 3), v.normal(2, 1), v.normal(2, 2)], -1), "negative"),
    sample(aten.cat.default, lambda v: ([v.normal(2), v.normal(3)],), "vectors"),
    sample(aten.cat.default, lambda v: ([v.normal(0), v.normal(2, 3)],), "legacy empty"),
    sample(aten.cat.default, lambda v: ([v.normal(2, 3), v.normal(2, 3, dtype=torch.float32)],), "dtypes"),
    sample(aten.stack.default, lambda v: ([v.normal(2, 3), v.normal(2, 3)], 1)),
    sample(aten.stack.default, lambda v: ([v.normal(2, 3), v.normal(2, 3)], -1), "negative"),
    sample(aten.stack.default, lambda v: ([v.normal(), v.normal()],), "scalars"),
    sample(aten.constant_pad_nd.default, lambda v: (v.normal(2, 3), [1, 2])),
    sample(aten.constant_pad_nd.default, lambda v: (v.normal(2, 3), [1, -1, 0, 2], 0.5), "negative"),
    sample(aten.flip.default, lambda v: (v.normal(2, 3), [1])),
    sample(aten.flip.default, lambda v: (v.normal(2, 3, 2), [0, -1]), "negative"),
    sample(aten.select_scatter.default, lambda v: (v.normal(2, 3), v.normal(2), 1, 2)),
    sample(aten.select_scatter.default, lambda v: (v.normal(2, 3), v.normal(3), -2, -1), "negative"),
    sample(aten.slice_scatter.default, lambda v: (v.normal(4, 3), v.normal(2, 3), 0, 1, 3)),
    sample(aten.slice_scatter.default, lambda v: (v.normal(4, 5), v.normal(4, 2), -1, 0, 4, 2), "negative"),
    sample(aten.slice_scatter.default, lambda v: (v.normal(4), v.normal(4)), "defaults"),
]

REDUCTIONS = [
    sample(aten.sum.dim_IntList, lambda v: (v.normal(2, 3, 4), [1])),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(2, 3, 4), [-1, 0], True), "negative, kept"),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(2, 3, 4), []), "no dims"),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(2, 3, 4), None), "None"),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(2, 3), None, True), "None, kept"),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(), [0]), "scalar"),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(), None, True), "scalar, kept"),
    sample(aten.sum.dim_IntList, lambda v: (v.normal(0, 3), [0]), "empty"),
    Sample(
        aten.sum.dim_IntList,
        lambda v: ((v.normal(2, 3, dtype=torch.float32), [0]), {"dtype": torch.float64}),
        "dtype",
    ),
    sample(aten.sum.dim_IntList, lambda v: (v.booleans(4, 3), [0]), "booleans"),
    sample(aten.mean.dim, lambda v: (v.normal(2, 3, 4), [0, 2])),
    sample(aten.mean.dim, lambda v: (v.normal(2, 3, 4), [-1], True), "negative, kept"),
    sample(aten.mean.dim, lambda v: (v.normal(2, 3), None), "None"),
    sample(aten.mean.dim, lambda v: (v.normal(), None), "scalar"),
    sample(aten.sum.default, lambda v: (v.normal(2, 3),)),
    sample(aten.sum.default, lambda v: (v.normal(),), "scalar"),
    sample(aten.sum.default, lambda v: (v.integers(9, 2, 3, dtype=torch.int32),), "integers"),
    Sample(
        aten.sum.default, lambda v: ((v.normal(3, dtype=torch.float32),), {"dtype": torch.float64}), "dtype"
    ),
    sample(aten.mean.default, lambda v: (v.normal(2, 3),)),
    sample(aten.mean.default, lambda v: (v.normal(),), "scalar"),
    sample(aten.amax.default, lambda v: (v.normal(2, 3), [1])),
    sample(aten.amax.default, lambda v: (v.normal(2, 3, 2), [-1, 0], True), "negative, kept"),
    sample(aten.amax.default, lambda v: (v.normal(2, 3),), "defaults"),
    sample(aten.amax.default, lambda v: (v.normal(),), "scalar"),
    sample(aten.amin.default, lambda v: (v.normal(2, 3), [0])),
    sample(aten._softmax.default, lambda v: (v.normal(2, 3), 1, False)),
    sample(aten._softmax.default, lambda v: (v.normal(2, 3, 2), -2, False), "negative"),
    sample(aten._softmax.default, lambda v: (v.normal(), 0, False), "scalar"),
    sample(aten._log_softmax.default, lambda v: (v.normal(2, 3), 0, False)),
    sample(aten._log_softmax.default, lambda v: (v.normal(2, 3), -1, False), "negative"),
    sample(aten._log_softmax.default, lambda v: (v.normal(), -1, False), "scalar"),
    sample(aten._safe_softmax.default, lambda v: (v.normal(2, 3), 1)),
    sample(
        aten._safe_softmax.default,
        lambda v: (
            v.normal(4, 3).masked_fill(torch.tensor([[True], [False], [False], [True]]), -torch.inf),
            -1,
        ),
        "blind rows",
    ),
    sample(
        aten._softmax_backward_data.default,
        lambda v: (v.normal(2, 3), v.normal(2, 3).softmax(1), 1, torch.float64),
    ),
    sample(
        aten._softmax_backward_data.default,
        lambda v: (v.normal(2, 3, 2), v.normal(2, 3, 2).softmax(1), -2, torch.float64),
        "negative",
    ),
    sample(
        aten._softmax_backward_data.default,
        lambda v: (v.normal(), v.normal().softmax(0), 0, torch.float64),
        "scalar",
    ),
    sample(
        aten._log_softmax_backward_data.default,
        lambda v: (v.normal(2, 3), v.normal(2, 3).log_softmax(1), 1, torch.float64),
    ),
    sample(
        aten._log_softmax_backward_data.default,
        lambda v: (v.normal(2, 3), v.normal(2, 3).log_softmax(0), -2, torch.float64),
        "negative",
    ),
    sample(aten.cumsum.default, lambda v: (v.normal(2, 3), 0)),
    sample(aten.cumsum.default, lambda v: (v.normal(2, 3), -1), "negative"),
    sample(aten.cumsum.default, lambda v: (v.normal(), 0), "scalar"),
    sample(aten.cumsum.default, lambda v: (v.booleans(5), 0), "booleans"),
    Sample(aten.cumsum.default, lambda v: ((v.integers(5, 4), 0), {"dtype": torch.float64}), "dtype"),
    sample(aten.cumprod.default, lambda v: (v.normal(2, 3), 1)),
]

MATMULS = [
    sample(aten.mm.default, lambda v: (v.normal(2, 3), v.normal(3, 4)), how="bmm"),
    sample(aten.mm.default, lambda v: (v.normal(1, 3), v.normal(3, 1)), "thin", how="bmm"),
    sample(aten.mm.default, lambda v: (v.normal(0, 3), v.normal(3, 2)), "empty", how="bmm"),
    sample(aten.addmm.default, lambda v: (v.normal(4), v.normal(2, 3), v.normal(3, 4)), how="bmm"),
    sample(aten.addmm.default, lambda v: (v.normal(2, 4), v.normal(2, 3), v.normal(3, 4)), "matrix"),
    sample(aten.addmm.default, lambda v: (v.normal(2, 1), v.normal(2, 3), v.normal(3, 4)), "column"),
    sample(aten.addmm.default, lambda v: (v.normal(), v.normal(2, 3), v.normal(3, 4)), "scalar"),
    Sample(
        aten.addmm.default,
        lambda v: ((v.normal(4), v.normal(2, 3), v.normal(3, 4)), {"beta": 0.5, "alpha": -2.0}),
        "factors",
    ),
    sample(aten.bmm.default, lambda v: (v.normal(2, 3, 4), v.normal(2, 4, 5))),
    sample(aten.bmm.default, lambda v: (v.normal(0, 3, 4), v.normal(0, 4, 5)), "empty"),
    sample(aten.baddbmm.default, lambda v: (v.normal(2, 3, 5), v.normal(2, 3, 4), v.normal(2, 4, 5))),
    sample(aten.baddbmm.default, lambda v: (v.normal(5), v.normal(2, 3, 4), v.normal(2, 4, 5)), "vector"),
    sample(aten.baddbmm.default, lambda v: (v.normal(1, 3, 1), v.normal(2, 3, 4), v.normal(2, 4, 5)), "thin"),
    Sample(
        aten.baddbmm.default,
        lambda v: ((v.normal(2, 3, 5), v.normal(2, 3, 4), v.normal(2, 4, 5)), {"beta": 2.0, "alpha": 0.5}),
        "factors",
    ),
    sample(aten.mv.default, lambda v: (v.normal(2, 3), v.normal(3))),
    sample(aten.dot.default, lambda v: (v.normal(3), v.normal(3))),
]


def without_beta(v: Values) -> tuple[Any, ...]:
    return (torch.full((4,), torch.nan, dtype=torch.float64), v.normal(2, 3), v.normal(3, 4)), {"beta": 0.0}


MATMULS.append(Sample(aten.addmm.default, without_beta, "bias ignored"))

EMBEDDINGS = [
    sample(aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5, 2, 4))),
    sample(aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5)), "one index"),
    sample(aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5, 0)), "no index"),
    sample(
        aten.embedding.default, lambda v: (v.normal(5, 3), v.integers(5, 4, dtype=torch.int32), 2), "int32"
    ),
    *[
        sample(
            aten.embedding_dense_backward.default,
            lambda v, p=padding, f=by_frequency: (v.normal(2, 4, 3), v.integers(5, 2, 4), 5, p, f),
            f"padding {padding}{', by frequency' if by_frequency else ''}",
            how="offset indices, one call",
        )
        for padding in (-1, 0, 4)
        for by_frequency in (False, True)
    ],
    sample(
        aten.embedding_dense_backward.default,
        lambda v: (v.normal(4, 3), v.integers(5, 4, dtype=torch.int32), 5, -1, False),
        "int32",
    ),
    sample(
        aten.embedding_dense_backward.default,
        lambda v: (v.normal(3), v.integers(5), 5, -1, False),
        "one index",
    ),
    *[
        sample(
            aten.index_add.default,
            lambda v, d=dim: (v.normal(3, 4), d, v.integers((3, 4)[d], 5), v.normal(*((5, 4), (3, 5))[d])),
            f"dim {dim}",
            how="offset indices, one call",
        )
        for dim in (0, 1, -1)
    ],
]


def statistics(v: Values, channels: int) -> tuple[Tensor, Tensor]:
    return v.normal(channels), v.positive(channels)


def affine_inputs(v: Values, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    return v.normal(*shape), v.normal(shape[1]), v.normal(shape[1])


def norm_samples(shape: tuple[int, ...]) -> list[Sample]:
    channels = shape[1]
    return [
        sample(
            aten._native_batch_norm_legit_functional.default,
            lambda v: (*affine_inputs(v, shape), *statistics(v, channels), True, 0.1, 1e-5),
            f"{len(shape)} dimensions",
            traces=len(shape) == 4,
        ),
        sample(
            aten._native_batch_norm_legit_functional.default,
            lambda v: (v.normal(*shape), None, None, *statistics(v, channels), True, 0.3, 1e-3),
            f"{len(shape)} dimensions, no affine",
        ),
        sample(
            aten._native_batch_norm_legit_no_training.default,
            lambda v: (*affine_inputs(v, shape), *statistics(v, channels), 0.1, 1e-5),
            f"{len(shape)} dimensions",
            traces=len(shape) == 4,
        ),
        sample(
            aten._native_batch_norm_legit.no_stats,
            lambda v: (v.normal(*shape), v.normal(channels), v.normal(channels), True, 0.1, 1e-5),
            f"{len(shape)} dimensions",
            traces=len(shape) == 4,
        ),
        sample(
            aten.native_batch_norm.default,
            lambda v: (*affine_inputs(v, shape), *statistics(v, channels), False, 0.1, 1e-5),
            f"{len(shape)} dimensions",
            traces=len(shape) == 4,
        ),
    ]


def norm_backward(train: bool, mask: list[bool], affine: bool = True) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        weight = v.normal(2) if affine else None
        saved = (v.normal(2), v.positive(2)) if train else (None, None)
        return (v.normal(4, 2, 3), v.normal(4, 2, 3), weight, *statistics(v, 2), *saved, train, 1e-5, mask)

    label = f"{'train' if train else 'eval'} {mask}{'' if affine else ' no affine'}"
    # A gradient that is masked out is no output of any graph; fake kernels make one up.
    return sample(aten.native_batch_norm_backward.default, make, label, traces=all(mask))


def layer_norm(weight: bool, bias: bool, shape: list[int]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        return (
            v.normal(2, 4, 3),
            shape,
            v.normal(*shape) if weight else None,
            v.normal(*shape) if bias else None,
            1e-5,
        )

    label = f"weight {weight} bias {bias} over {shape}"
    return sample(aten.native_layer_norm.default, make, label, traces=weight)


def layer_norm_backward(weight: bool, mask: list[bool], shape: list[int]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        x = v.normal(2, 4, 3)
        rows = [*x.shape[: 3 - len(shape)], *[1] * len(shape)]
        affine = (v.normal(*shape), v.normal(*shape)) if weight else (None, None)
        return (v.normal(2, 4, 3), x, shape, v.normal(*rows), v.positive(*rows), *affine, mask)

    label = f"weight {weight} {mask} over {shape}"
    return sample(aten.native_layer_norm_backward.default, make, label, traces=True)


NORMS = [
    *norm_samples((4, 2)),
    *norm_samples((3, 2, 2, 2)),
    norm_backward(True, [True, True, True]),
    norm_backward(True, [False, True, True]),
    norm_backward(True, [True, False, False]),
    norm_backward(True, [True, False, False], affine=False),
    norm_backward(False, [True, True, True]),
    norm_backward(False, [True, False, True]),
    layer_norm(True, True, [3]),
    layer_norm(True, False, [3]),
    layer_norm(False, True, [3]),
    layer_norm(False, False, [3]),
    layer_norm(True, True, [4, 3]),
    layer_norm(True, True, [2, 4, 3]),
    layer_norm_backward(True, [True, True, True], [3]),
    layer_norm_backward(True, [False, True, True], [3]),
    layer_norm_backward(True, [True, True, False], [4, 3]),
    layer_norm_backward(True, [True, True, True], [2, 4, 3]),
    layer_norm_backward(False, [True, False, False], [3]),
]


def pool_indices(v: Values) -> tuple[Any, ...]:
    x = v.normal(2, 2, 4, 4)
    _, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    return (v.normal(2, 2, 2, 2), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


POOLS = [
    sample(aten.max_pool2d_with_indices.default, lambda v: (v.normal(2, 3, 4, 4), [2, 2])),
    sample(
        aten.max_pool2d_with_indices.default,
        lambda v: (v.normal(2, 3, 5, 5), [3, 2], [2, 1], [1, 1], [1, 2], True),
        "geometry",
    ),
    sample(aten.max_pool2d_with_indices.default, lambda v: (v.normal(3, 4, 4), [2, 2]), "no batch"),
    sample(aten.max_pool2d_with_indices_backward.default, pool_indices),
    sample(aten.avg_pool2d.default, lambda v: (v.normal(2, 3, 4, 4), [2, 2])),
    sample(
        aten.avg_pool2d.default,
        lambda v: (v.normal(2, 3, 5, 5), [3, 3], [2, 2], [1, 1], True, False, 7),
        "geometry",
    ),
    sample(
        aten.avg_pool2d_backward.default,
        lambda v: (v.normal(2, 3, 2, 2), v.normal(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    sample(aten._adaptive_avg_pool2d.default, lambda v: (v.normal(2, 3, 5, 4), [2, 3])),
    sample(aten._adaptive_avg_pool2d.default, lambda v: (v.normal(2, 3, 5, 4), [1, 1]), "global"),
    sample(
        aten._adaptive_avg_pool2d_backward.default, lambda v: (v.normal(2, 3, 2, 3), v.normal(2, 3, 5, 4))
    ),
    sample(aten.upsample_nearest2d.default, lambda v: (v.normal(2, 3, 2, 2), [4, 6], 2.0, 3.0)),
    sample(
        aten.upsample_nearest2d_backward.default,
        lambda v: (v.normal(2, 3, 4, 6), [4, 6], [2, 3, 2, 2], 2.0, 3.0),
    ),
    sample(aten.upsample_bilinear2d.default, lambda v: (v.normal(2, 3, 2, 2), [4, 6], False, 2.0, 3.0)),
    sample(aten.upsample_bilinear2d.default, lambda v: (v.normal(2, 3, 2, 2), [4, 6], True), "corners"),
    sample(
        aten.upsample_bilinear2d_backward.default,
        lambda v: (v.normal(2, 3, 4, 6), [4, 6], [2, 3, 2, 2], False, 2.0, 3.0),
    ),
]

CONSTANTS = [
    sample(aten.zeros_like.default, lambda v: (v.normal(2, 3),), how="shared constant"),
    Sample(aten.zeros_like.default, lambda v: ((v.normal(2, 3),), {"dtype": torch.int64}), "dtype"),
    sample(aten.ones_like.default, lambda v: (v.booleans(2, 3),), how="shared constant"),
    Sample(
        aten.ones_like.default,
        lambda v: ((v.normal(2, 3, 2, 2),), {"memory_format": torch.channels_last}),
        "format",
    ),
    sample(aten.empty_like.default, lambda v: (v.normal(2, 3),), unfilled=True),
    sample(aten.full_like.default, lambda v: (v.normal(2, 3), 2.5), how="shared constant"),
    sample(aten.full_like.default, lambda v: (v.normal(), -1), "scalar"),
    sample(aten.full_like.default, lambda v: (v.booleans(2), True), "booleans"),
    sample(aten.new_zeros.default, lambda v: (v.normal(2), [3, 1])),
    sample(aten.new_ones.default, lambda v: (v.integers(3, 2), [3])),
    sample(aten.new_empty.default, lambda v: (v.normal(2), [3, 1]), unfilled=True),
    sample(aten.new_empty_strided.default, lambda v: (v.normal(2), [3, 2], [2, 1]), unfilled=True),
    sample(aten.copy.default, lambda v: (v.normal(2, 3), v.normal(3))),
    sample(aten.copy.default, lambda v: (v.normal(2, 3, dtype=torch.float32), v.normal(2, 1)), "dtype"),
    sample(aten.copy.default, lambda v: (v.normal(), v.normal()), "scalar"),
    sample(aten.new_full.default, lambda v: (v.normal(2), [3, 1], 1.5)),
    sample(aten.new_full.default, lambda v: (v.normal(2), [], 1.5), "scalar"),
    Sample(aten.new_full.default, lambda v: ((v.normal(2), [3], 1), {"dtype": torch.int32}), "dtype"),
    sample(
        torch.ops.trainmux.random_words.default,
        lambda v: (v.integers(2**40), v.integers(2**40), 3, [2, 5]),
        how="counters",
    ),
]

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def heads(v: Values, length: int) -> Tensor:
    return v.normal(2, 3, length, 8)


def flash(mask_shape: tuple[int, ...] | None, causal: bool = False, scale: float | None = None) -> Sample:
    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = None if mask_shape is None else v.normal(*mask_shape)
        return (heads(v, 4), heads(v, 5), heads(v, 5), 0.0, causal), {"attn_mask": mask, "scale": scale}

    label = f"mask {mask_shape} causal {causal} scale {scale}"
    return Sample(FLASH, make, label, "fold model axis into batch", traces=True)


def flash_backward(mask_shape: tuple[int, ...] | None, causal: bool = False) -> Sample:
    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query, key, value = heads(v, 4), heads(v, 5), heads(v, 5)
        mask = None if mask_shape is None else v.normal(*mask_shape)
        out, logsumexp = FLASH(query, key, value, 0.0, causal, attn_mask=mask)
        args = (v.normal(2, 3, 4, 8), query, key, value, out, logsumexp, 0.0, causal)
        return args, {"attn_mask": mask}

    label = f"mask {mask_shape} causal {causal}"
    return Sample(FLASH_BACKWARD, make, label, "fold model axis into batch", traces=not causal)


ATTENTION = [
    flash(None),
    flash(None, causal=True),
    flash(None, scale=0.3),
    flash((4, 5)),
    flash((1, 1, 4, 5)),
    flash((2, 1, 4, 5)),
    flash((2, 3, 4, 5)),
    flash((1, 3, 4, 5)),
    flash_backward(None),
    flash_backward(None, causal=True),
    flash_backward((4, 5)),
    flash_backward((2, 1, 4, 5)),
]

EVERY = VIEWS + REDUCTIONS + MATMULS + EMBEDDINGS + NORMS + POOLS + CONSTANTS + ATTENTION


@pytest.mark.parametrize("given", EVERY, ids=lambda given: given.name)
def test_a_rule_gives_what_members_compute_alone(given: Sample) -> None:
    check_everything(given)


def test_every_rule_has_a_sample() -> None:
    needs_cuda = set(attention._FORWARD + attention._BACKWARD) - {FLASH, FLASH_BACKWARD}
    # Convolution has a file of its own; filling by a tensor is among the pointwise operators.
    elsewhere = {aten.convolution.default, aten.convolution_backward.default, aten.masked_fill.Tensor}
    registered = set(_stacked._RULES)
    sampled = {given.op for given in EVERY}
    assert registered - needs_cuda - elsewhere == sampled
