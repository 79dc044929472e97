"""Element by element: broadcasting between members of different ranks, and type promotion as for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, batched_combinations, check_everything, check_rule, make_case, sample

from trainmux.fusion.rules.pointwise import EXTRA, is_pointwise

aten = torch.ops.aten
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

UNARY = [
    *[
        sample(op, lambda v: (v.normal(2, 3),))
        for op in (
            aten.abs.default,
            aten.cos.default,
            aten.erf.default,
            aten.exp.default,
            aten.expm1.default,
            aten.floor.default,
            aten.isnan.default,
            aten.neg.default,
            aten.relu.default,
            aten.round.default,
            aten.sigmoid.default,
            aten.sign.default,
            aten.silu.default,
            aten.sin.default,
            aten.tanh.default,
            aten.gelu.default,
            aten.mish.default,
            aten.hardsigmoid.default,
            aten.softplus.default,
            aten.elu.default,
            aten.hardtanh.default,
            aten.leaky_relu.default,
            aten.lift_fresh_copy.default,
        )
    ],
    *[
        sample(op, lambda v: (v.positive(2, 3),))
        for op in (aten.log.default, aten.log1p.default, aten.sqrt.default, aten.rsqrt.default)
    ],
    sample(aten.reciprocal.default, lambda v: (v.positive(),), "scalar"),
    sample(aten.logical_not.default, lambda v: (v.booleans(3),)),
    sample(aten.bitwise_not.default, lambda v: (v.integers(9, 3),)),
    sample(aten.pow.Tensor_Scalar, lambda v: (v.normal(2, 3), 3)),
    sample(aten.pow.Scalar, lambda v: (2.0, v.normal(2, 3))),
    sample(aten.clamp.default, lambda v: (v.normal(2, 3), -0.5, 0.5)),
    sample(aten.add.Scalar, lambda v: (v.normal(2, 3), 2)),
    sample(aten.eq.Scalar, lambda v: (v.integers(3, 4), 1)),
    sample(aten.clone.default, lambda v: (v.normal(2, 3),)),
    Sample(
        aten.clone.default,
        lambda v: ((v.normal(2, 3, 2, 2),), {"memory_format": torch.channels_last}),
        "channels last",
    ),
    Sample(
        aten.clone.default,
        lambda v: ((v.normal(2, 3),), {"memory_format": torch.contiguous_format}),
        "contiguous",
    ),
    Sample(aten._to_copy.default, lambda v: ((v.normal(2, 3),), {"dtype": FP32})),
    Sample(
        aten._to_copy.default,
        lambda v: ((v.normal(2, 3, 2, 2),), {"dtype": FP32, "memory_format": torch.channels_last}),
        "channels last",
    ),
    Sample(aten.gelu.default, lambda v: ((v.normal(2, 3),), {"approximate": "tanh"}), "tanh"),
]


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
        sample(op, lambda v, a=a, b=b: (v.positive(*a), v.positive(*b)), label)
        for label, (a, b) in shapes.items()
    ]


BINARY = [
    *pairs(aten.add.Tensor),
    *pairs(aten.mul.Tensor),
    *pairs(aten.div.Tensor),
    *[
        sample(op, lambda v: (v.normal(2, 3), v.normal(3)))
        for op in (
            aten.sub.Tensor,
            aten.maximum.default,
            aten.minimum.default,
            aten.atan2.default,
            aten.gt.Tensor,
            aten.le.Tensor,
            aten.fmod.Tensor,
            aten.remainder.Tensor,
            aten.copysign.Tensor,
        )
    ],
    sample(aten.pow.Tensor_Tensor, lambda v: (v.positive(2, 3), v.normal(3))),
    Sample(aten.add.Tensor, lambda v: ((v.normal(2, 3), v.normal(3)), {"alpha": 0.5}), "alpha"),
    Sample(aten.div.Tensor_mode, lambda v: ((v.normal(2, 3), v.normal(3)), {"rounding_mode": "floor"})),
    sample(aten.eq.Tensor, lambda v: (v.integers(3, 4), v.integers(3, 2, 4))),
    sample(aten.logical_and.default, lambda v: (v.booleans(3), v.booleans(2, 3))),
    sample(aten.bitwise_and.Tensor, lambda v: (v.booleans(3), v.booleans(2, 3))),
    sample(aten.lerp.Scalar, lambda v: (v.normal(2, 3), v.normal(3), 0.3)),
]

TERNARY = [
    sample(aten.where.self, lambda v: (v.booleans(2, 3), v.normal(2, 3), v.normal(2, 3))),
    sample(aten.where.self, lambda v: (v.booleans(3), v.normal(2, 3), v.normal()), "ranks"),
    sample(aten.where.self, lambda v: (v.booleans(2, 1), v.normal(), v.normal()), "scalars"),
    sample(aten.masked_fill.Scalar, lambda v: (v.normal(2, 3), v.booleans(2, 3), -1.0)),
    sample(aten.masked_fill.Scalar, lambda v: (v.normal(2, 3), v.booleans(3), -torch.inf), "ranks"),
    sample(aten.masked_fill.Scalar, lambda v: (v.normal(), v.booleans(), 1.0), "scalars"),
    sample(aten.masked_fill.Tensor, lambda v: (v.normal(2, 3), v.booleans(2, 3), v.normal())),
    sample(aten.lerp.Tensor, lambda v: (v.normal(2, 3), v.normal(2, 3), v.normal(3))),
    Sample(aten.addcmul.default, lambda v: ((v.normal(2, 3), v.normal(3), v.normal(2, 1)), {"value": 0.5})),
    sample(aten.addcdiv.default, lambda v: (v.normal(3), v.normal(2, 3), v.positive())),
    sample(aten.clamp.Tensor, lambda v: (v.normal(2, 3), v.normal(3), v.normal())),
]


def grad_and_input(v: Values) -> tuple[Any, Any]:
    return v.normal(2, 3), v.normal(2, 3)


BACKWARDS = [
    *[
        sample(op, grad_and_input)
        for op in (
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.silu_backward.default,
            aten.gelu_backward.default,
            aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
            aten.mish_backward.default,
        )
    ],
    Sample(aten.gelu_backward.default, lambda v: (grad_and_input(v), {"approximate": "tanh"}), "tanh"),
    sample(aten.threshold_backward.default, lambda v: (*grad_and_input(v), 0)),
    sample(aten.leaky_relu_backward.default, lambda v: (*grad_and_input(v), 0.1, False)),
    sample(aten.elu_backward.default, lambda v: (v.normal(2, 3), 1.5, 1.0, 1.0, False, v.normal(2, 3))),
    sample(aten.softplus_backward.default, lambda v: (*grad_and_input(v), 1.0, 20.0)),
    sample(aten.hardtanh_backward.default, lambda v: (*grad_and_input(v), -0.5, 0.5)),
    sample(aten.log_sigmoid_backward.default, lambda v: (*grad_and_input(v), v.positive(2, 3))),
]

EVERY = UNARY + BINARY + TERNARY + BACKWARDS


@pytest.mark.parametrize("given", EVERY, ids=lambda given: given.name)
def test_an_operator_gives_what_members_compute_alone(given: Sample) -> None:
    # What torch tags as pointwise differs a little between releases; the numbers may not.
    check_everything(given)


def test_every_operator_named_beside_torchs_tag_has_a_sample() -> None:
    assert {given.op for given in EVERY} >= EXTRA


def test_operators_that_are_not_pointwise_are_not_taken_for_it() -> None:
    for op in (aten.sum.default, aten.mm.default, aten.sort.default, aten.index.Tensor, len):
        assert not is_pointwise(op)


# ---- type promotion --------------------------------------------------------------------------------------
#
# A member's scalar ranks below dimensioned tensors. Stacked it has a dimension, and the result must still
# be what it was.

PROMOTIONS = {
    "bf16 * fp32 scalar": lambda v: (v.normal(2, 3, dtype=BF16), v.normal(dtype=FP32)),
    "fp32 scalar * bf16": lambda v: (v.normal(dtype=FP32), v.normal(2, 3, dtype=BF16)),
    "fp32 * fp64 scalar": lambda v: (v.normal(2, 3, dtype=FP32), v.normal(dtype=FP64)),
    "bf16 * bf16 scalar": lambda v: (v.normal(2, 3, dtype=BF16), v.normal(dtype=BF16)),
    "bf16 * fp32": lambda v: (v.normal(2, 3, dtype=BF16), v.normal(3, dtype=FP32)),
    "bf16 scalar * fp32 scalar": lambda v: (v.normal(dtype=BF16), v.normal(dtype=FP32)),
    "int64 * fp32 scalar": lambda v: (v.integers(9, 2, 3), v.normal(dtype=FP32)),
    "int64 scalar * bf16": lambda v: (v.integers(9), v.normal(2, 3, dtype=BF16)),
    "int32 * int64 scalar": lambda v: (v.integers(9, 2, 3, dtype=torch.int32), v.integers(9)),
    "bool * fp32 scalar": lambda v: (v.booleans(2, 3), v.normal(dtype=FP32)),
}


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.add.Tensor], ids=str)
@pytest.mark.parametrize("name", PROMOTIONS)
def test_a_scalar_promotes_as_it_does_for_one_member(name: str, op: Any) -> None:
    check_everything(sample(op, PROMOTIONS[name], name))


@pytest.mark.parametrize(
    "given",
    [
        sample(aten.div.Tensor, PROMOTIONS["bf16 * fp32 scalar"], "bf16 / fp32 scalar"),
        sample(
            aten.where.self,
            lambda v: (v.booleans(2, 3), v.normal(2, 3, dtype=BF16), v.normal(dtype=FP32)),
            "bf16 or fp32 scalar",
        ),
        sample(
            aten.clamp.Tensor,
            lambda v: (v.normal(2, 3, dtype=BF16), v.normal(dtype=FP32), v.normal(dtype=FP32)),
            "bf16 between fp32 scalars",
        ),
        sample(aten.maximum.default, PROMOTIONS["bf16 * fp32 scalar"], "bf16 and fp32 scalar"),
        sample(aten.pow.Tensor_Tensor, lambda v: (v.positive(3, dtype=BF16), v.positive(dtype=FP32)), "bf16"),
        Sample(
            aten.addcmul.default,
            lambda v: ((v.normal(3, dtype=BF16), v.normal(3, dtype=BF16), v.normal(dtype=FP32)), {}),
            "bf16",
        ),
    ],
    ids=lambda given: given.name,
)
def test_other_operators_promote_a_scalar_too(given: Sample) -> None:
    check_everything(given)


@pytest.mark.parametrize("op", [aten.eq.Tensor, aten.lt.Tensor], ids=str)
def test_a_comparison_rounds_a_scalar_as_it_does_for_one_member(op: Any) -> None:
    """A bf16 tensor meets an fp32 scalar in bf16: 0.1 in bf16 equals 0.1 in fp32 there."""

    def make(v: Values) -> tuple[Any, Any]:
        scalar = v.normal(dtype=FP32)
        return scalar.to(BF16).expand(4).clone(), scalar

    given = sample(op, make, "bf16 and fp32 scalar")
    for batched in batched_combinations(2):
        assert check_rule(make_case(given, 3, batched))
