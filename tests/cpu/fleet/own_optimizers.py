"""Optimizers that a user might bring, each in another style of writing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 0.01, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, p.grad, self.state[p])

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Own):
    """Signs of an average."""

    def __init__(
        self, params: Any, betas: Any = (0.9, 0.99), weight_decay: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(params, betas=betas, weight_decay=weight_decay, **settings)

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((state["exp_avg"] * beta1 + grad * (1 - beta1)).sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(grad, alpha=1 - beta2)


class Lamb(torch.optim.Optimizer):
    """The way it is found in many repositories: Python's count, ``math``, branches on norms."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: Any = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                exp_avg = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                update = exp_avg / exp_avg_sq.sqrt().add(group["eps"])
                if group["weight_decay"] != 0:
                    update.add_(p.data, alpha=group["weight_decay"])
                weight_norm, update_norm = p.data.pow(2).sum().sqrt().clamp(0, 10), update.norm().item()
                trust = 1.0 if weight_norm == 0 or update_norm == 0 else weight_norm.item() / update_norm
                p.data.add_(update, alpha=-size * trust)


class Anchored(_Own):
    """State of its own: where the parameter was, the first gradient, a float, and a warm-up."""

    def __init__(self, params: Any, pull: float = 0.1, warmup: float = 4, **settings: Any) -> None:
        super().__init__(params, pull=pull, warmup=warmup, **settings)

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if len(state) == 0:
            state.update(step=0, start=p.clone(), first=grad.clone(), mass=1.0)
        state["step"] += 1
        state["mass"] = 0.9 * state["mass"] + min(1.0, group["lr"] * 10)
        rate = group["lr"] * min(1.0, state["step"] / group["warmup"]) / state["mass"]
        p.add_(grad + 0.01 * state["first"] + group["pull"] * (p - state["start"]), alpha=-rate)


class Orthogonal(_Own):
    """Muon in the parameter's own precision: products of matrices."""

    def __init__(self, params: Any, momentum: float = 0.9, num_rounds: int = 3, **settings: Any) -> None:
        super().__init__(params, momentum=momentum, num_rounds=num_rounds, **settings)

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        buffer = state.setdefault("buffer", torch.zeros_like(p))
        buffer.lerp_(grad, 1 - group["momentum"])
        wide = buffer.T if buffer.size(0) > buffer.size(1) else buffer
        wide = wide / wide.norm().clamp(min=1e-7)
        for _ in range(group["num_rounds"]):
            gram = wide @ wide.T
            wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.8, alpha=2.0), wide, beta=3.4)
        wide = wide.T if buffer.size(0) > buffer.size(1) else wide
        p.add_(wide, alpha=-group["lr"] * math.sqrt(max(1, p.size(0) / p.size(1))))


class Centred(torch.optim.Adam):
    """Torch's Adam on gradients without their mean."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sub_(p.grad.mean())
        return super().step(closure)


class PlainMomentum(torch.optim.SGD):
    """Nothing changed."""


# ---- refused -----------------------------------------------------------------------------------------------


class GlobalNorm(_Own):
    """Scales by the norm over all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            for p in params:
                p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


class OwnCounter(_Own):
    """Counts in an attribute."""

    num_steps = 0

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        self.num_steps += 1
        p.sub_(group["lr"] / math.sqrt(self.num_steps) * grad)


class GroupCounter(_Own):
    """Counts in the param group."""

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1
        p.sub_(group["lr"] / group["count"] * grad)


class ThroughNumpy(_Own):
    """Computes a number where it cannot be followed."""

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(float(np.log1p(state["step"])) * group["lr"] * grad)


class Noisy(_Own):
    """Langevin dynamics."""

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        p.sub_(group["lr"] * grad + 0.1 * torch.randn_like(p))


class Searching(_Own):
    """As many rounds as it takes."""

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        while grad.norm() > 1:
            grad = grad * 0.5
        p.sub_(group["lr"] * grad)


class Remembering(_Own):
    """Keeps a list."""

    def update(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("past", []).append(grad)
        p.sub_(group["lr"] * sum(state["past"]))
