"""Torch's own database of operators and samples: as models to train, and to compare functions with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.testing._utils
import torch.utils._pytree as pytree
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import TrainmuxError


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# The database sets a seed around what draws numbers; here draws are to be seen from outside.
with warnings.catch_warnings(), mock.patch.object(torch.testing._utils, "wrapper_set_seed", _call):
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
# The import forbids all tests of this process to set torch.backends' flags; ours set some.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
assert not torch.backends.flags_frozen()

FAILURES = ("wrong", "untyped")  # other states: equal, refused, random, skipped
_MEMBERS = (1.0, 0.93, 1.05)  # each trains from the sample's numbers by a factor, which few domains forbid
_TOLERANCE = 1e-8  # of a loss or the largest number of a gradient

Sample = Any  # torch's SampleInput


OPERATORS = {
    ".".join(part for part in (operator.name, operator.variant_test_name) if part): operator
    for operator in op_db
    if operator.supports_autograd and torch.float64 in operator.supported_dtypes("cpu")
}
"""All that have gradients in double precision on a CPU, by name."""


def spread(items: Iterable[Any], count: int) -> list[Any]:
    """At most ``count`` of them, from the first on, equally far apart."""
    every = list(items)
    count = min(count, len(every))
    return [every[position * len(every) // count] for position in range(count)]


def samples_of(operator: Any, count: int) -> list[Sample]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return spread(operator.sample_inputs("cpu", torch.float64, requires_grad=True), count)


def weighted_sum(result: Any) -> Tensor | None:
    """A scalar in which every differentiable number of ``result`` has a weight of its own."""
    total = None
    for position, value in enumerate(pytree.tree_leaves(result), start=1):
        if not isinstance(value, Tensor) or not value.requires_grad:
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        weights = torch.linspace(0.3, 1.7, real.numel(), dtype=real.dtype).reshape(real.shape)
        part = (real * weights).sum() * position
        total = part if total is None else total + part
    return total


class _Held(nn.Module):
    """The tensors of a sample by place: learned ones as parameters, other numbers as buffers."""

    def __init__(self, leaves: Sequence[Any], factor: float) -> None:
        super().__init__()
        for place, leaf in enumerate(leaves):
            if _role(leaf) == "learned":
                self.register_parameter(f"leaf_{place}", nn.Parameter(leaf.detach() * factor))
            elif _role(leaf) == "number":
                self.register_buffer(f"leaf_{place}", leaf.detach().clone())


class _Case:
    """One sample of an operator as a loss over ``_Held`` and a batch of the sample's indices and masks."""

    def __init__(self, operator: Any, sample: Sample) -> None:
        leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
        roles = [_role(leaf) for leaf in leaves]
        fed = [place for place, role in enumerate(roles) if role == "batch"]
        self.leaves, self.has_learned = leaves, "learned" in roles
        self.batch = (torch.ones(1, dtype=torch.float64), *(leaves[place] for place in fed))

        def loss(model: nn.Module, batch: Any) -> Any:
            filled = list(leaves)
            for place, tensor in zip(fed, batch[1:], strict=True):
                filled[place] = tensor
            for place, role in enumerate(roles):
                if role in ("learned", "number"):
                    held = getattr(model, f"leaf_{place}")
                    # Times one: some operators change what they are given, which a parameter must not be.
                    filled[place] = held * 1.0 if role == "learned" else held
            first, args, kwargs = pytree.tree_unflatten(filled, spec)
            total = weighted_sum(sample.output_process_fn_grad(operator.op(first, *args, **kwargs)))
            return total if total is None else total + 0.0 * batch[0].sum()

        self.loss: Callable[[nn.Module, Any], Any] = loss


def _role(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return "other"
    if leaf.requires_grad and leaf.dtype == torch.float64 and leaf.layout == torch.strided:
        return "learned"
    if leaf.dtype.is_floating_point and leaf.layout == torch.strided:
        return "number"
    return "batch"


def outcome(operator: Any, sample: Sample, width: int) -> tuple[str, str]:
    """Train ``width`` members by one step of gradient descent, in a fleet and in plain torch, and compare.

    Gives what came of it, and in which words.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = _Case(operator, sample)
        if not case.has_learned:
            return "skipped", "nothing to learn"
        models = [_Held(case.leaves, factor) for factor in _MEMBERS[:width]]
        plain = copy.deepcopy(models)
        try:
            torch.manual_seed(1)
            before = torch.get_rng_state()
            losses = [_plain_step(model, case) for model in plain]
        except Exception as error:
            return "skipped", f"plain torch: {type(error).__name__}: {error}"
        if any(loss is None for loss in losses):
            return "skipped", "no differentiable result"
        is_random = not torch.equal(before, torch.get_rng_state())
        members = [
            tm.Member(model, torch.optim.SGD(model.parameters(), lr=1.0), name=str(position))
            for position, model in enumerate(models)
        ]
        try:
            fleet = tm.Fleet(members, loss=case.loss, example_batch=case.batch, precision="fp64")
            got = fleet.step(case.batch).tolist()
            fleet.sync()
        except TrainmuxError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "untyped", f"{type(error).__name__}: {error}"
    if is_random:
        return "random", ""  # draws differ from torch's by design
    if not all(_is_finite(loss, model) for loss, model in zip(losses, plain, strict=True)):
        return "skipped", "not finite, which stops a member"
    wrong = _difference(losses, plain, got, models)
    return ("wrong", wrong) if wrong else ("equal", "")


def _plain_step(model: nn.Module, case: _Case) -> Tensor | None:
    loss = case.loss(model, case.batch)
    if loss is None or not loss.requires_grad:
        return None
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return loss.detach()


def _is_finite(loss: Tensor | None, model: nn.Module) -> bool:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return all(bool(torch.isfinite(value).all()) for value in (loss, *gradients))


def _difference(losses: Any, plain: Sequence[_Held], got: Sequence[float], models: Sequence[_Held]) -> str:
    for member, (loss, value) in enumerate(zip(losses, got, strict=True)):
        if abs(value - float(loss)) > _TOLERANCE * max(1.0, abs(float(loss))):
            return f"member {member}: loss {value}, expected {float(loss)}"
    for member, (expected, model) in enumerate(zip(plain, models, strict=True)):
        gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
        found = model.state_dict()
        for name, value in expected.state_dict().items():
            gradient = gradients.get(name)
            finite = value[torch.isfinite(value)]
            sized = [tensor for tensor in (finite, gradient) if tensor is not None and tensor.numel()]
            scales = [tensor.abs().max().item() for tensor in sized]
            atol = _TOLERANCE * max(1.0, *scales, 0.0)
            if not torch.allclose(found[name], value, rtol=0.0, atol=atol, equal_nan=True):
                distance = (found[name] - value).abs().nan_to_num(0.0).max().item()
                return f"member {member}: {name} off by {distance:.3g} after the step"
    return ""
