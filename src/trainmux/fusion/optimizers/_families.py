"""The supported torch optimizers: for each its scalars, its formula and its update."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainmux.fusion.optimizers._rule import (
    Number,
    Numbers,
    NumericSetting,
    OptimizerFamily,
    ScalarAt,
    Settings,
    UpdateRule,
    accumulate_square_,
    blend_,
    choose,
    descent_direction,
    plus_product,
    power,
    quotient,
    root,
    times,
    unswitched_momentum,
)

_State = Mapping[str, Tensor]
_GRADIENT = {"sign": 1.0, "weight_decay": 0.0}
_LR, _EPS, _DECAY, _MOMENTUM = map(NumericSetting, ("lr", "eps", "weight_decay", "momentum"))


# ---- SGD: momentum, dampening and Nesterov's look-ahead ----------------------------------------------------

_SGD_SETTINGS = (_LR, _MOMENTUM, NumericSetting("dampening"), _DECAY)


def _sgd(momentum: bool, nesterov: bool) -> UpdateRule:
    """Torch starts the momentum buffer as a copy of the first direction, undampened: keep 0, gain 1."""
    buffer_scalars = {"keep": 0.0, "gain": 1.0, "write": -0.0} if momentum else {}
    if nesterov:
        buffer_scalars = {"keep": 1.0, "gain": -0.0, "look_ahead": 0.0}

    def formula(numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        sign, decay, step = numbers["sign"], numbers["weight_decay"], -numbers["lr"]
        factor = unswitched_momentum(numbers, had_momentum=momentum)
        if not momentum:
            return sign, decay, step
        first = steps_done == 0
        keep = choose(first, 0.0, factor)
        gain = choose(first, 1.0, 1.0 - numbers["dampening"])
        return sign, decay, keep, gain, (factor if nesterov else 1.0), step

    def update(param: Tensor, grad: Tensor, state: _State, at: ScalarAt, idle: frozenset[str]) -> None:
        direction = descent_direction(param, grad, at, idle)
        if not momentum:
            param.addcmul_(direction, at("step"))
            return
        buffer = state["momentum_buffer"]
        if nesterov:
            buffer.mul_(at("keep")).addcmul_(direction, at("gain"))
            direction = plus_product(direction, buffer, at("look_ahead"), grad=grad)
            param.addcmul_(direction, at("step"))
            return
        # The new buffer is not computed in place. A frozen row thus has a direction of +0.0 to step
        # along, which the buffer itself, being state, could not be.
        if "dampening" not in idle:
            direction = times(direction, at("gain"), grad=grad)
        direction = plus_product(direction, buffer, at("keep"), grad=grad)
        param.addcmul_(direction, at("step"))
        blend_(buffer, direction, at("write"))

    scalars = _GRADIENT | buffer_scalars | {"step": -0.0}
    names = ("momentum_buffer",) if momentum else ()
    return UpdateRule(_SGD_SETTINGS, names, scalars, formula, update, counts_steps=False)


def _sgd_flags(settings: Settings) -> dict[str, bool]:
    momentum = float(settings["momentum"]) != 0.0
    # Torch looks at nesterov only where there is momentum.
    return {"momentum": momentum, "nesterov": momentum and bool(settings["nesterov"])}


# ---- Adam and AdamW: one rule, with the weight decay in the gradient or applied to the parameter -----------

_ADAM_SETTINGS = (
    _LR,
    NumericSetting("betas", index=0, upper=1.0),
    NumericSetting("betas", index=1, upper=1.0),
    _EPS,
    _DECAY,
)


def _adam(amsgrad: bool, decoupled: bool) -> UpdateRule:
    """Torch divides ``sqrt(exp_avg_sq)`` by the root of the second bias correction, one pass over memory.

    Here both sides of the fraction are multiplied by that root, which moves it into ``eps`` and ``step``.
    """

    def formula(numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        lr, decay = numbers["lr"], numbers["weight_decay"]
        beta1, beta2 = numbers["betas[0]"], numbers["betas[1]"]
        step = steps_done + 1
        root_correction2 = root(1.0 - power(beta2, step))
        return (
            numbers["sign"],
            1.0 - lr * decay if decoupled else decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            numbers["eps"] * root_correction2,
            0.0,
            -(lr / (1.0 - power(beta1, step))) * root_correction2,
        )

    def update(param: Tensor, grad: Tensor, state: _State, at: ScalarAt, idle: frozenset[str]) -> None:
        exp_avg, second_moment = state["exp_avg"], state["exp_avg_sq"]
        direction = descent_direction(param, grad, at, idle | {"weight_decay"} if decoupled else idle)
        blend_(exp_avg, direction, at("one_minus_beta1"))
        accumulate_square_(second_moment, direction, at("beta2"), at("one_minus_beta2"))
        if amsgrad:
            second_moment = state["max_exp_avg_sq"].clamp_min_(second_moment)
        denominator = second_moment.sqrt().add_(at("eps"))
        # A frozen row divides by infinity, and the sum with zero drops the sign of what remains of exp_avg.
        step = quotient(at("zero"), exp_avg, denominator)
        if decoupled and "weight_decay" not in idle:
            param.mul_(at("shrink"))
        param.addcmul_(step, at("step"))

    decay = {"sign": 1.0, "shrink": 1.0} if decoupled else _GRADIENT
    moments = {"one_minus_beta1": -0.0, "beta2": 1.0, "one_minus_beta2": -0.0}
    scalars = decay | moments | {"eps": math.inf, "zero": 0.0, "step": -0.0}
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
    return UpdateRule(_ADAM_SETTINGS, names, scalars, formula, update)


def _adam_flags(settings: Settings) -> dict[str, bool]:
    decoupled = bool(settings.get("decoupled_weight_decay", False))
    return {"amsgrad": bool(settings["amsgrad"]), "decoupled": decoupled}


def _adamw_flags(settings: Settings) -> dict[str, bool]:
    return {"amsgrad": bool(settings["amsgrad"]), "decoupled": True}


# ---- RMSprop, plain or centered, with or without momentum --------------------------------------------------

_RMSPROP_SETTINGS = (_LR, NumericSetting("alpha"), _EPS, _DECAY, _MOMENTUM)


def _rmsprop(centered: bool, momentum: bool) -> UpdateRule:
    """A centered row whose ``square_avg`` is below ``grad_avg ** 2`` yields NaN, as it does in torch.

    That holds for a frozen row as well, but no state that an active step left finite is of this kind.
    """

    def formula(numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        sign, decay, alpha = numbers["sign"], numbers["weight_decay"], numbers["alpha"]
        factor = unswitched_momentum(numbers, had_momentum=momentum)
        plain = (sign, decay, alpha, 1.0 - alpha, numbers["eps"], 0.0, -numbers["lr"])
        return (*plain, factor, 1.0) if momentum else plain

    def update(param: Tensor, grad: Tensor, state: _State, at: ScalarAt, idle: frozenset[str]) -> None:
        square_avg = state["square_avg"]
        direction = descent_direction(param, grad, at, idle)
        accumulate_square_(square_avg, direction, at("alpha"), at("one_minus_alpha"))
        if centered:
            grad_avg = state["grad_avg"]
            blend_(grad_avg, direction, at("one_minus_alpha"))
            denominator = torch.addcmul(square_avg, grad_avg, grad_avg, value=-1).sqrt_()
        else:
            denominator = square_avg.sqrt()
        denominator.add_(at("eps"))
        step = quotient(at("zero"), direction, denominator)
        if not momentum:
            param.addcmul_(step, at("step"))
            return
        # As in SGD: the new buffer is not computed in place, so that a frozen row steps by zero.
        buffer = state["momentum_buffer"]
        step = plus_product(step, buffer, at("momentum"), grad=grad)
        param.addcmul_(step, at("step"))
        blend_(buffer, step, at("write"))

    scalars = _GRADIENT | {"alpha": 1.0, "one_minus_alpha": -0.0, "eps": math.inf, "zero": 0.0, "step": -0.0}
    if momentum:
        scalars |= {"momentum": 0.0, "write": -0.0}
    present = {"square_avg": True, "momentum_buffer": momentum, "grad_avg": centered}
    names = tuple(name for name, is_present in present.items() if is_present)
    return UpdateRule(_RMSPROP_SETTINGS, names, scalars, formula, update)


def _rmsprop_flags(settings: Settings) -> dict[str, bool]:
    return {"centered": bool(settings["centered"]), "momentum": float(settings["momentum"]) > 0.0}


# ---- Adagrad with a decaying learning rate -----------------------------------------------------------------

_INITIAL = "initial_accumulator_value"
_ADAGRAD_SETTINGS = (_LR, NumericSetting("lr_decay"), _EPS, _DECAY, NumericSetting(_INITIAL))


def _adagrad() -> UpdateRule:
    """Its state is filled as torch does: from the constructor, also where a group names another value."""

    def formula(numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        lr = numbers["lr"] / (1.0 + steps_done * numbers["lr_decay"])
        return numbers["sign"], numbers["weight_decay"], numbers["eps"], 0.0, -lr

    def update(param: Tensor, grad: Tensor, state: _State, at: ScalarAt, idle: frozenset[str]) -> None:
        direction = descent_direction(param, grad, at, idle)
        accumulator = state["sum"].addcmul_(direction, direction)
        denominator = accumulator.sqrt().add_(at("eps"))
        param.addcmul_(quotient(at("zero"), direction, denominator), at("step"))

    scalars = _GRADIENT | {"eps": math.inf, "zero": 0.0, "step": -0.0}
    return UpdateRule(_ADAGRAD_SETTINGS, ("sum",), scalars, formula, update, initial_setting=_INITIAL)


# ---- Adadelta: the step follows from averages of squared gradients and squared steps -----------------------

_ADADELTA_SETTINGS = (_LR, NumericSetting("rho", upper=1.0, upper_included=True), _EPS, _DECAY)


def _adadelta() -> UpdateRule:
    def formula(numbers: Numbers, steps_done: Number) -> tuple[Number, ...]:
        rho = numbers["rho"]
        return numbers["sign"], numbers["weight_decay"], rho, 1.0 - rho, numbers["eps"], -numbers["lr"]

    def update(param: Tensor, grad: Tensor, state: _State, at: ScalarAt, idle: frozenset[str]) -> None:
        square_avg, acc_delta = state["square_avg"], state["acc_delta"]
        eps, rho, one_minus_rho = at("eps"), at("rho"), at("one_minus_rho")
        direction = descent_direction(param, grad, at, idle)
        accumulate_square_(square_avg, direction, rho, one_minus_rho)
        # Two roots and then the quotient, though the other order saves a pass: in half precision the
        # quotient of the squares leaves the range of the dtype where the quotient of the roots does not.
        denominator = torch.add(square_avg, eps).to(param.dtype).sqrt_()
        delta = torch.add(acc_delta, eps).to(param.dtype).sqrt_().div_(denominator).mul_(direction)
        accumulate_square_(acc_delta, delta, rho, one_minus_rho)
        param.addcmul_(delta, at("step"))

    # eps is neutral at one and not at infinity: here it stands on both sides of a fraction.
    scalars = _GRADIENT | {"rho": 1.0, "one_minus_rho": -0.0, "eps": 1.0, "step": -0.0}
    return UpdateRule(_ADADELTA_SETTINGS, ("square_avg", "acc_delta"), scalars, formula, update)


FAMILIES: tuple[OptimizerFamily, ...] = (
    OptimizerFamily(torch.optim.SGD, "SGD", _SGD_SETTINGS, _sgd, _sgd_flags),
    OptimizerFamily(torch.optim.Adam, "Adam", _ADAM_SETTINGS, _adam, _adam_flags),
    OptimizerFamily(torch.optim.AdamW, "Adam", _ADAM_SETTINGS, _adam, _adamw_flags),
    OptimizerFamily(torch.optim.RMSprop, "RMSprop", _RMSPROP_SETTINGS, _rmsprop, _rmsprop_flags),
    OptimizerFamily(torch.optim.Adagrad, "Adagrad", _ADAGRAD_SETTINGS, _adagrad),
    OptimizerFamily(torch.optim.Adadelta, "Adadelta", _ADADELTA_SETTINGS, _adadelta),
)
