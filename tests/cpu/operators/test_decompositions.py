"""Functions in Python that take the place of torch's kernels while tracing, each compared with its kernel.

Under the python dispatcher an operator runs as a Python function where torch, or ``_composites.py``, has
registered one. Such a function may be wrong where the kernel is right: torch's own tests miss cases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from operator_database import OPERATORS, spread, weighted_sum
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.nn.utils import rnn
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux.tracing._composites import own_composites
from trainmux.tracing._joint import _DECOMPOSE
from trainmux.tracing._torch_private import (
    DECOMPOSITION_KEYS,
    DispatchKey,
    decomposition_keys,
    tracing_thread,
)

aten = torch.ops.aten
_NUM_QUICK, _NUM_SAMPLES = 2, 16


@dataclass(frozen=True)
class Call:
    """A function of tensors, of which ``learned`` have gradients."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    learned: tuple[bool, ...]


def _call(function: Callable[..., Any], *tensors: Tensor) -> Call:
    return Call(function, tensors, tuple(tensor.is_floating_point() for tensor in tensors))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


Calls = Callable[[int], list[Call]]
"""Calls of an operator, at most so many for each of its names in the database."""


def _from_database(*names: str) -> Calls:
    """The samples of these operators, with numbers as they are and rounded, so that some are equal."""

    def calls(most: int) -> list[Call]:
        found: list[Call] = []
        for name in names:
            operator = OPERATORS[name]
            samples = [
                *operator.sample_inputs("cpu", torch.float64, requires_grad=True),
                *operator.reference_inputs("cpu", torch.float64, requires_grad=True),
            ]
            for sample in spread(samples, most):
                found += [_of_sample(operator, sample, rounds) for rounds in (False, True)]
        return found

    return calls


def _of_sample(operator: Any, sample: Any, rounds: bool) -> Call:
    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def function(*given: Tensor) -> Any:
        left = iter(given)
        filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        return operator.op(first, *args, **kwargs)

    rounded = [(t * 2).round() / 2 if rounds and t.dtype == torch.float64 else t for t in tensors]
    values = tuple(tensor.detach().clone() for tensor in rounded)
    return Call(function, values, tuple(tensor.requires_grad for tensor in tensors))


def _layers(make: Callable[..., nn.Module], packed: bool) -> Calls:
    def calls(most: int) -> list[Call]:
        options: list[dict[str, Any]] = [{}, {"batch_first": True}, {"bias": False, "num_layers": 2}]
        options += [{"bidirectional": True, "num_layers": 2}]
        options += [{"proj_size": 2}] if make is nn.LSTM else []
        return [_layer(make(3, 4, **each).double(), packed) for each in options]

    return calls


def _layer(layer: Any, packed: bool) -> Call:
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Any:
        given: Any = x
        if packed:
            given = rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=layer.batch_first)
        output, state = functional_call(layer, dict(zip(names, parameters, strict=True)), (given,))
        return (output.data if packed else output), state

    x = _normal(2, 5, 3) if layer.batch_first else _normal(5, 2, 3)
    return _call(function, x, *(parameter.detach() for parameter in layer.parameters()))


def _each(
    function: Callable[..., Any], options: list[dict[str, Any]], *makers: Callable[[], Tensor]
) -> Calls:
    """The function with each of these options, of tensors that are made for each call."""
    return lambda most: [_call(partial(function, **each), *(make() for make in makers)) for each in options]


def _antialiased(op: str) -> Calls:
    sizes = [
        {"output_size": size, "align_corners": corners}
        for size in ([3, 4], [9, 8])
        for corners in (False, True)
    ]
    return _each(partial(getattr(aten, op).vec, scale_factors=None), sizes, lambda: _normal(2, 3, 6, 7))


def _pad(*parts: Tensor, **options: Any) -> Tensor:
    return rnn.pad_sequence(list(parts), **options)


def _istft(x: Tensor, window: Tensor, **options: Any) -> Tensor:
    return torch.istft(torch.view_as_complex(x), 8, hop_length=2, window=window, **options)


RECURRENT: dict[str, Callable[..., nn.Module]] = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
    "rnn_tanh": nn.RNN,
}
FUNCTIONALS = ("batch_norm", "dropout", "hardshrink", "layer_norm", "multi_margin_loss", "softshrink")
FUNCTIONALS += ("scaled_dot_product_attention",)
SOURCES: dict[str, Calls] = {
    "aten._upsample_bicubic2d_aa.vec": _antialiased("_upsample_bicubic2d_aa"),
    "aten._upsample_bilinear2d_aa.vec": _from_database("_upsample_bilinear2d_aa"),
    "aten._upsample_lanczos2d_aa.vec": _antialiased("_upsample_lanczos2d_aa"),
    "aten.broadcast_tensors.default": _from_database("broadcast_tensors", "nn.functional.mse_loss"),
    "aten.embedding_bag.padding_idx": _from_database("nn.functional.embedding_bag"),
    "aten.istft.default": _each(
        _istft,
        [{}, {"center": False}, {"normalized": True}, {"length": 30}],
        lambda: _normal(3, 5, 12, 2),
        lambda: torch.hann_window(8, dtype=torch.float64) + 0.1,
    ),
    "aten.matmul.default": _from_database("matmul", "cdist"),
    "aten.matmul.out": _from_database("matrix_exp"),
    "aten.multilabel_margin_loss_forward.default": _from_database("nn.functional.multilabel_margin_loss"),
    "aten.native_batch_norm.default": _from_database("native_batch_norm", "nn.functional.instance_norm"),
    "aten.native_dropout_backward.default": _from_database("native_dropout_backward"),
    "aten.one_hot.default": _each(
        F.one_hot, [{}, {"num_classes": 5}], lambda: torch.tensor([[0, 2], [3, 1]])
    ),
    "aten.pad_sequence.default": _each(
        _pad,
        [{}, {"batch_first": True, "padding_value": 0.5}, {"padding_side": "left"}],
        *(lambda length=length: _normal(length, 2) for length in (4, 2, 3)),
    ),
    "aten.rrelu_with_noise_backward.default": _from_database("nn.functional.rrelu"),
    "aten.select_backward.default": _from_database("select", "__getitem__"),
    "aten.slice_backward.default": _from_database("slice", "narrow", "__getitem__"),
    "aten.stft.center": _from_database("stft"),
    "aten.tensor_split.tensor_indices_or_sections": _from_database("tensor_split"),
    "aten.unsafe_chunk.default": _from_database("unsafe_chunk"),
    **{f"aten.{name}.default": _from_database(f"nn.functional.{name}") for name in FUNCTIONALS},
    **{f"aten.{name}.data": _layers(make, packed=True) for name, make in RECURRENT.items()},
    **{f"aten.{name}.input": _layers(make, packed=False) for name, make in RECURRENT.items()},
}
WITHOUT_SAMPLE = {
    "aten.cudnn_batch_norm.default": "needs a library that only CUDA devices have",
    "aten.embedding_bag.default": "one function with its other overload, which torch's functions call",
    "aten.empty.out": "its numbers mean nothing",
    "aten.miopen_batch_norm.default": "needs a library that only AMD's devices have",  # from torch 2.15 on
    "aten.to_dense.default": "of sparse tensors, which no member has",  # from torch 2.15 on
}


def _all_operators() -> Iterator[OpOverload]:
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops, space), packet, None)
        operator = getattr(found, overload or "default", None)
        if isinstance(operator, OpOverload):
            yield operator


def _decomposed() -> dict[str, OpOverload]:
    """All operators that tracing takes as a Python function."""
    with own_composites():
        found = [op for op in _all_operators() if decomposition_keys(op)]
    found += [op for op in torch._decomp.get_decompositions(_DECOMPOSE) if not op._schema.is_mutable]
    return {str(op): op for op in found}


TAKEN = _decomposed()


@contextmanager
def _as_in_a_trace(seen: set[str]) -> Iterator[None]:
    """While active, operators run as tracing takes them; notes the names of Python functions."""

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.add(name)
            return function(*args, **kwargs)

        return run

    table: Any = {op: noted(str(op), run) for op, run in torch._decomp.get_decompositions(_DECOMPOSE).items()}

    class Decomposed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return table.get(func, func)(*args, **(kwargs or {}))

    with ExitStack() as stack:
        stack.enter_context(own_composites())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, op in TAKEN.items():
            for key in decomposition_keys(op):
                patch.setitem(op.py_kernels, key, noted(name, op.py_kernels[key]))
                op._dispatch_cache.clear()
                stack.callback(op._dispatch_cache.clear)
        stack.enter_context(tracing_thread())
        stack.enter_context(Decomposed())
        yield


def _computed(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients."""
    leaves = [
        t.detach().clone().requires_grad_(learns)
        for t, learns in zip(call.tensors, call.learned, strict=True)
    ]
    torch.manual_seed(1)
    # Times one: some operators change what they are given.
    results = call.function(*[leaf * 1 if leaf.requires_grad else leaf for leaf in leaves])
    values = [value for value in pytree.tree_leaves(results) if isinstance(value, Tensor)]
    loss = weighted_sum(values)
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    if loss is None or not learning:
        return values, []
    # A NaN has a gradient that differs even between a kernel's vector and scalar code.
    gradients = torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True)
    return values, [] if loss.isnan() else list(gradients)


def test_every_function_that_tracing_takes_has_samples_or_is_listed() -> None:
    assert set(TAKEN) - set(SOURCES) - set(WITHOUT_SAMPLE) == set()


def test_functions_are_registered_under_keys_that_are_known() -> None:
    keys = {key for op in _all_operators() for key in op.py_kernels}
    assert keys <= {*DECOMPOSITION_KEYS, DispatchKey.Meta}


@pytest.mark.parametrize("most", [_NUM_QUICK, pytest.param(_NUM_SAMPLES, marks=pytest.mark.operators)])
@pytest.mark.parametrize("name", [name for name in SOURCES if name in TAKEN])
def test_function_that_tracing_takes_computes_as_the_kernel(name: str, most: int) -> None:
    torch.manual_seed(0)
    num_compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in SOURCES[name](most):
            try:
                expected = _computed(call)
            except Exception:
                continue  # rounded numbers are not in every operator's domain
            seen: set[str] = set()
            try:
                with _as_in_a_trace(seen):
                    found = _computed(call)
            except Exception:
                continue  # a trace that ends with an error is refused
            num_compared += name in seen
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert num_compared > 0
