"""Random operators become functions of counters (D11).

While a member's code is traced, each random operator is decomposed into arithmetic on ``random_words``,
whose operator number counts the random operators of a call: stable, because the graph is that of one member
whatever the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from trainmux.errors import TraceError
from trainmux.runtime import WORD_RANGE, random_words
from trainmux.tracing._passes import constant_value, is_attention
from trainmux.tracing._source import current_user_frame, node_location, refusal
from trainmux.tracing._torch_private import traced_module, traced_node

aten = torch.ops.aten


class Draws:
    """Draws of a member's random operators, one after another: words, and what is made of them."""

    def __init__(self, seed: Tensor, counter: Tensor) -> None:
        self._seed = seed
        self._counter = counter
        self._operator = -1
        self._is_seeded = False
        self._seeded_at: str | None = None

    def note_seed(self, seed: int) -> torch.Generator:
        """Stand in for ``torch.manual_seed``: of no consequence, unless something is drawn after it."""
        self._is_seeded, self._seeded_at = True, current_user_frame()
        return torch.default_generator

    def by_next_operator(self) -> Draws:
        self._operator += 1
        return self

    def words(self, shape: torch.Size, stream: int = 0) -> Tensor:
        if self._is_seeded:
            raise refusal(
                "torch.manual_seed is called",
                " before numbers are drawn; expected draws from the member's seed, which are others in every "
                "step: keep numbers that are always the same in a buffer of the model, or leave the call out",
                self._seeded_at,
            )
        # Two bits of the operator word tell apart the draws of one operator that needs several.
        words: Tensor = random_words(self._seed, self._counter, 4 * self._operator + stream, list(shape))
        return words

    def uniform(self, shape: torch.Size, dtype: torch.dtype, stream: int = 0) -> Tensor:
        """In [0, 1), with as many bits as the dtype can hold."""
        words = self.words(shape, stream)
        if dtype == torch.float64:
            low = self.words(shape, stream + 1)
            return ((words << 21) | (low >> 11)).to(torch.float64) * 2.0**-53
        bits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
        return (words >> (32 - bits)).to(dtype) * 2.0**-bits

    def normal(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Standard normal by Box and Muller's transform, in at least single precision."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        radius = torch.sqrt(-2.0 * torch.log1p(-self.uniform(shape, wide, 0)))
        angle = (2.0 * math.pi) * self.uniform(shape, wide, 2)
        return (radius * torch.cos(angle)).to(dtype)

    def true_with(self, shape: torch.Size, probability: float) -> Tensor:
        """Boolean, true with ``probability``."""
        threshold = round(probability * WORD_RANGE)
        return self.words(shape) < threshold

    def integers(self, shape: torch.Size, low: int, high: int, dtype: torch.dtype) -> Tensor:
        if high - low > 2**31:
            raise TraceError(
                f"expected a random integer range of at most 2**31, got {high - low}; draw smaller numbers"
            )
        return (((self.words(shape) * (high - low)) >> 32) + low).to(dtype)


def _dtype(kwargs: dict[str, Any], default: torch.dtype | None = None) -> torch.dtype:
    return kwargs.get("dtype") or default or torch.get_default_dtype()


def _native_dropout(d: Draws, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1.0:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = d.true_with(x.shape, 1.0 - p)
    return x * mask * (1.0 / (1.0 - p)), mask


def _normal(d: Draws, mean: Tensor | float, std: Tensor | float) -> Tensor:
    parts = [part for part in (mean, std) if isinstance(part, Tensor)]
    shape = torch.broadcast_shapes(*[part.shape for part in parts])
    return d.normal(shape, parts[0].dtype) * std + mean


def _rrelu(
    d: Draws,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Output and slopes: 1 where the input is positive, drawn between the bounds where it is not."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slopes = torch.where(x > 0, 1.0, d.uniform(x.shape, x.dtype) * (upper - lower) + lower).to(x.dtype)
    return x * slopes, slopes


_RULES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.p: lambda d, x, p=0.5, **kw: d.true_with(x.shape, p).to(x.dtype),
    aten.bernoulli.default: lambda d, x, **kw: (d.uniform(x.shape, torch.float32) < x).to(x.dtype),
    aten.bernoulli.Tensor: lambda d, x, p, **kw: (d.uniform(x.shape, torch.float32) < p).to(x.dtype),
    aten.rand.default: lambda d, size, **kw: d.uniform(torch.Size(size), _dtype(kw)),
    aten.randn.default: lambda d, size, **kw: d.normal(torch.Size(size), _dtype(kw)),
    aten.rand_like.default: lambda d, x, **kw: d.uniform(x.shape, _dtype(kw, x.dtype)),
    aten.randn_like.default: lambda d, x, **kw: d.normal(x.shape, _dtype(kw, x.dtype)),
    aten.uniform.default: lambda d, x, low=0.0, high=1.0, **kw: (
        d.uniform(x.shape, x.dtype) * (high - low) + low
    ),
    aten.normal_functional.default: lambda d, x, mean=0.0, std=1.0, **kw: (
        d.normal(x.shape, x.dtype) * std + mean
    ),
    aten.normal.float_float: lambda d, mean, std, size, **kw: (
        d.normal(torch.Size(size), _dtype(kw)) * std + mean
    ),
    aten.normal.Tensor_float: lambda d, mean, std=1.0, **kw: _normal(d, mean, std),
    aten.normal.float_Tensor: lambda d, mean, std, **kw: _normal(d, mean, std),
    aten.normal.Tensor_Tensor: lambda d, mean, std, **kw: _normal(d, mean, std),
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.exponential.default: lambda d, x, lambd=1.0, **kw: (
        -torch.log1p(-d.uniform(x.shape, x.dtype)) / lambd
    ),
    aten.randint.default: lambda d, high, size, **kw: d.integers(
        torch.Size(size), 0, high, kw.get("dtype") or torch.int64
    ),
    aten.randint.low: lambda d, low, high, size, **kw: d.integers(
        torch.Size(size), low, high, kw.get("dtype") or torch.int64
    ),
    aten.randint_like.default: lambda d, x, high, **kw: d.integers(x.shape, 0, high, _dtype(kw, x.dtype)),
    aten.randint_like.low_dtype: lambda d, x, low, high, **kw: d.integers(
        x.shape, low, high, _dtype(kw, x.dtype)
    ),
    aten.randperm.default: lambda d, n, **kw: torch.argsort(d.words(torch.Size([n])), stable=True).to(
        _dtype(kw, torch.int64)
    ),
}


_UNIFORM = (_RULES[aten.rand.default], _RULES[aten.rand_like.default])
_DRAWN = "drawn from [0, 1)"
"""Mark of a node."""
_COPIES = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.view.default}
)
_COMPARISONS: dict[Any, bool] = {
    aten.lt.Scalar: True,
    aten.le.Scalar: True,
    aten.gt.Scalar: False,
    aten.ge.Scalar: False,
}
"""Comparisons of a draw with a number, and whether they ask for it to be less."""
_HALF_OPEN = frozenset({aten.lt.Scalar, aten.ge.Scalar})
"""Comparisons with 0 whose result is known for a draw, which may be 0 itself."""


def random_decompositions(draws: Callable[[], Draws]) -> dict[Any, Callable[..., Any]]:
    """Decompositions of random operators into ``draws()``, those of the call that is being traced."""

    def decomposed(rule: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is not None:
                return NotImplemented  # becomes a node, which is refused when the trace is done
            drawn = rule(draws().by_next_operator(), *args, **kwargs)
            if rule in _UNIFORM and (node := traced_node(drawn)) is not None:
                node.meta[_DRAWN] = True
            # Words are made where the seed is, and go where the user's code expects them.
            place = kwargs.get("device")
            return drawn if place is None or place.type == drawn.device.type else drawn.to(place)

        return draw

    return {op: decomposed(rule) for op, rule in _RULES.items()}


class DrawnBranchError(RuntimeError):
    """Python reads a number that is drawn anew in every step."""


def known_scalar(value: Tensor) -> Any:
    """A number that Python reads while it is traced, where it is the same in every step.

    That is a constant, or the outcome of ``draw < p`` and the like where ``p`` is 0 or 1: layers are then
    never or always skipped. Raises ``DrawnBranchError`` for other ``p``; else returns ``NotImplemented``.
    """
    node = _original(traced_node(value))
    if node is None:
        return NotImplemented
    constant = constant_value(traced_module(), node)
    if constant is not None:
        return constant.item()
    is_less = _COMPARISONS.get(node.target)
    draw = node if is_less is None else _original(node.all_input_nodes[0])
    if draw is None or not draw.meta.get(_DRAWN):
        return NotImplemented
    bound = None if is_less is None else node.args[1]
    if is_less is not None and isinstance(bound, int | float):
        if bound < 0 or (bound == 0 and node.target in _HALF_OPEN):
            return not is_less
        if bound >= 1:
            return is_less
    raise DrawnBranchError


def _original(node: fx.Node | None) -> fx.Node | None:
    while node is not None and node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def refuse_random_nodes(module: fx.GraphModule) -> None:
    """Refuse operators that still draw from a generator of torch's or of the user's."""
    for node in module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags or is_attention(node.target):
            continue  # attention has the tag for its dropout, which is an operator of its own here
        if node.kwargs.get("generator") is not None:
            raise own_generator_error(str(node.target), node_location(node))
        raise refusal(
            f"random operator {node.target}",
            " has no counter-based form; supported are dropout, bernoulli, rand, randn, uniform, normal, "
            "exponential, randint, randperm and their _like forms",
            node_location(node),
            node.target,
        )


def own_generator_error(op: str, location: str | None) -> TraceError:
    """Refuse draws from a generator of the user's own."""
    return refusal(
        f"random operator {op}",
        " draws from a torch.Generator of its own; expected none, because draws come from the member's seed: "
        "leave the generator out",
        location,
        op,
    )
