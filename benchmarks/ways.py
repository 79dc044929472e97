"""Ways to train several models: each makes a function that trains all of them on one batch.

``eager`` and ``compiled_graph`` train one model after another, ``eager_vmap`` and ``compiled_vmap_graph``
stack the members as HFTA does, by torch's own ``vmap``; ``trainmux`` is a fleet. ``mps`` is in ``step.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import trainmux as tm

from .cases import map_tensors, to_device

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPS = 1e-4, 0.01, (0.9, 0.999), 1e-8
SGD_LEARNING_RATE = 1e-2
NUM_CAPTURE_WARMUPS = 3
NUM_COMPILED_MODELS = 2
"""Models whose graphs alternate, so that none finds its weights in a cache from its own last step."""
NORMS_IN_FP32 = "vmap fails on normalisation layers under autocast: they compute in fp32"

Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Setup:
    """Models in host memory in fp32, one per member, and what to train them with.

    ``example`` is a batch on the device; ``fleet`` has further arguments for ``trainmux.Fleet``. The
    ``optimizer`` is ``"adamw"``, or ``"sgd"`` without momentum.
    """

    models: Sequence[nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    example: Any
    device: torch.device
    fleet: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"

    @property
    def learning_rates(self) -> list[float]:
        """One rate per member, all different."""
        count = len(self.models)
        rate = SGD_LEARNING_RATE if self.optimizer == "sgd" else LEARNING_RATE
        return [rate * (1 + number / count) for number in range(count)]

    @property
    def has_images(self) -> bool:
        return any(parameter.dim() == 4 for parameter in self.models[0].parameters())

    def placed(self) -> list[nn.Module]:
        """The models on the device, convolutional ones in the layout that is fastest for them."""
        layout = torch.channels_last if self.has_images else torch.preserve_format
        return [model.to(self.device, memory_format=layout) for model in self.models]  # type: ignore[call-overload]

    def laid_out(self, batch: Any) -> Any:
        """Images in the models' layout, everything else as it is."""
        if not self.has_images:
            return batch
        return map_tensors(
            lambda tensor: (
                tensor.contiguous(memory_format=torch.channels_last)
                if tensor.dim() == 4 and tensor.is_floating_point()
                else tensor
            ),
            batch,
        )

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def make_optimizer(name: str, model: nn.Module, lr: float, **settings: Any) -> torch.optim.Optimizer:
    """``"adamw"``, or ``"sgd"`` without momentum."""
    if name == "sgd":
        settings.pop("capturable", None)  # it counts nothing: a graph may hold it as it is
        return torch.optim.SGD(model.parameters(), lr, **settings)
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY, **settings)


@dataclass(frozen=True)
class Way:
    """A way to train. ``prepare`` gives the step and notes on what had to be done differently."""

    prepare: Callable[[Setup], tuple[Step, list[str]]]
    needs_cuda: bool = False
    num_models: int | None = None


def prepare_fleet(setup: Setup) -> tuple[Step, list[str]]:
    """All members as one fleet, whose first step waits for the compiler on a GPU."""
    members = [
        tm.Member(model, make_optimizer(setup.optimizer, model, lr), seed=number)
        for number, (model, lr) in enumerate(zip(setup.models, setup.learning_rates, strict=True))
    ]
    lowering = "inductor" if setup.device.type == "cuda" else "aten"
    arguments = {"precision": "bf16", "lowering": lowering, **setup.fleet}
    fleet = tm.Fleet(members, setup.loss, setup.example, device=setup.device, **arguments)
    return fleet.step, []


def prepare_eager(setup: Setup) -> tuple[Step, list[str]]:
    """One model after another in eager torch, the optimizer fused on CUDA."""
    members = [
        (model, make_optimizer(setup.optimizer, model, lr, fused=fused))
        for model, lr in zip(setup.placed(), setup.learning_rates, strict=True)
        for fused in (setup.device.type == "cuda",)
    ]

    def step(batch: Any) -> Tensor:
        losses = []
        for model, optimizer in members:
            optimizer.zero_grad(set_to_none=True)
            with setup.autocast():
                loss = setup.loss(model, setup.laid_out(to_device(batch, setup.device)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return step, []


def prepare_compiled(setup: Setup) -> tuple[Step, list[str]]:
    """One model after another: ``torch.compile``, fused AdamW, each model's whole step one CUDA graph."""
    compiled = torch.compile(lambda model, batch: setup.loss(model, setup.laid_out(batch)), dynamic=False)

    def member(model: nn.Module, lr: float) -> Step:
        optimizer = make_optimizer(setup.optimizer, model, lr, fused=True, capturable=True)

        def train(batch: Any) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with setup.autocast():
                loss: Tensor = compiled(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return captured(train, setup)

    steps = [member(model, lr) for model, lr in zip(setup.placed(), setup.learning_rates, strict=True)]
    return lambda batch: torch.stack([step(batch) for step in steps]), []


def prepare_vmap(setup: Setup) -> tuple[Step, list[str]]:
    """All members in one ``vmap``, operator after operator, with a multi-tensor optimizer."""
    stack = _Stack(setup)

    def step(batch: Any) -> Tensor:
        losses, gradients = stack.gradients(to_device(batch, setup.device))
        stack.update_all(gradients)
        return losses

    return step, stack.notes


def prepare_compiled_vmap(setup: Setup) -> tuple[Step, list[str]]:
    """That step, update included, by ``torch.compile``, captured as one CUDA graph."""
    stack = _Stack(setup)

    def train(batch: Any) -> Tensor:
        losses, gradients = stack.gradients(batch)
        stack.update_each(gradients)
        return losses

    return captured(torch.compile(train, dynamic=False), setup), stack.notes


def prepare_save_on_cpu(setup: Setup) -> tuple[Step, list[str]]:
    """All members in one ``vmap``; what autograd saves waits in host memory (torch's ``save_on_cpu``)."""
    stack = _Stack(setup)

    def step(batch: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=setup.device.type == "cuda"):
            losses = stack.losses(to_device(batch, setup.device))
        stack.update_all(stack.backward(losses))
        return losses.detach()

    return step, stack.notes


def prepare_activation_budget(setup: Setup, share: float) -> tuple[Step, list[str]]:
    """All members in one ``vmap``, compiled; torch keeps ``share`` of what it would save and recomputes the
    rest (its ``activation_memory_budget``)."""
    stack = _Stack(setup)
    compiled = torch.compile(stack.losses, dynamic=False)

    def step(batch: Any) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=share):
            losses: Tensor = compiled(to_device(batch, setup.device))
        stack.update_all(stack.backward(losses))
        return losses.detach()

    return step, stack.notes


WAYS = {
    "eager": Way(prepare_eager),
    "compiled_graph": Way(prepare_compiled, needs_cuda=True, num_models=NUM_COMPILED_MODELS),
    "eager_vmap": Way(prepare_vmap),
    "compiled_vmap_graph": Way(prepare_compiled_vmap, needs_cuda=True),
    "trainmux": Way(prepare_fleet),
}


def captured(train: Step, setup: Setup) -> Step:
    """Capture ``train`` on fixed buffers as a CUDA graph; a step copies a batch into them and replays."""
    buffers: list[Tensor] = []

    def buffer(tensor: Tensor) -> Tensor:
        buffers.append(tensor.to(setup.device, copy=True))
        return buffers[-1]

    static = map_tensors(buffer, setup.example)
    stream = torch.cuda.Stream(setup.device)
    stream.wait_stream(torch.cuda.current_stream(setup.device))
    with torch.cuda.stream(stream):  # kernels are compiled and chosen, gradients belong to this stream
        for _ in range(NUM_CAPTURE_WARMUPS):
            train(static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        losses = train(static)
    torch.cuda.current_stream(setup.device).wait_stream(stream)

    def step(batch: Any, train: Step = train) -> Tensor:  # the graph holds addresses: ``train`` must live on
        fresh: list[Tensor] = []
        map_tensors(lambda tensor: fresh.append(tensor) or tensor, batch)  # type: ignore[func-returns-value]
        for target, source in zip(buffers, fresh, strict=True):
            target.copy_(source, non_blocking=True)
        graph.replay()
        return losses

    return step


class _WithLoss(nn.Module):
    """A model whose output is its loss: the loss function then sees the swapped tensors."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


class _Stack:
    """Stacked members ``[members, ...]``: loss and gradients by ``vmap``, updates with a rate per member."""

    def __init__(self, setup: Setup) -> None:
        models = [_WithLoss(model, setup.loss) for model in setup.models]
        parameters, buffers = stack_module_state(models)
        self._setup = setup
        self._parameters = {name: value.detach().to(setup.device) for name, value in parameters.items()}
        self._buffers = {name: value.detach().to(setup.device) for name, value in buffers.items()}
        # A copy on the same device: on torch's meta device, tied weights would no longer be tied.
        self._skeleton = copy.deepcopy(models[0]).to(setup.device)
        for module in self._skeleton.modules():
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(_refresh_flat_weights)
        self.notes = self._work_around_norms()
        values = list(self._parameters.values())
        rates = torch.tensor(setup.learning_rates, device=setup.device)
        shaped = [rates.view(-1, *[1] * (value.dim() - 1)) for value in values]
        self._values = values
        held = values if setup.optimizer == "adamw" else []
        self._averages = [torch.zeros_like(value) for value in held]
        self._squares = [torch.zeros_like(value) for value in held]
        self._keeps = [1 - rate * WEIGHT_DECAY for rate in shaped]
        self._descents = [-rate for rate in shaped]
        self._num_steps = torch.zeros((), device=setup.device)

    def gradients(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        return self._gradients(self._parameters, self._buffers, batch)

    def _gradients(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, list[Tensor]]:
        loss_of_one = self._loss_on(batch)
        with self._setup.autocast():
            gradients, losses = vmap(grad_and_value(loss_of_one), randomness="different")(parameters, buffers)
        return losses, list(gradients.values())

    def _loss_on(self, batch: Any) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]:
        def loss_of_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            loss: Tensor = functional_call(self._skeleton, (parameters, buffers), (batch,))
            return loss

        return loss_of_one

    def losses(self, batch: Any) -> Tensor:
        """Losses for `backward`: autograd records operators on all members, so that its hooks apply."""
        parameters = {name: value.requires_grad_() for name, value in self._parameters.items()}
        with self._setup.autocast():
            losses: Tensor = vmap(self._loss_on(batch), randomness="different")(parameters, self._buffers)
        return losses

    def backward(self, losses: Tensor) -> list[Tensor]:
        return list(
            torch.autograd.grad(losses.sum(), self._values, allow_unused=True, materialize_grads=True)
        )

    def _work_around_norms(self) -> list[str]:
        """Try the first member; where normalisation fails under autocast, give it fp32 inputs."""
        parameters = {name: value[:1] for name, value in self._parameters.items()}
        buffers = {name: value[:1].clone() for name, value in self._buffers.items()}
        try:
            self._gradients(parameters, buffers, to_device(self._setup.example, self._setup.device))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _compute_norms_in_fp32(self._skeleton):
                raise
            return [f"{NORMS_IN_FP32} (torch: {str(error).splitlines()[0]})"]
        return []

    @torch.no_grad()
    def update_all(self, gradients: list[Tensor]) -> None:
        """All parameters in each operator: fastest in eager torch."""
        if self._setup.optimizer == "sgd":
            torch._foreach_addcmul_(self._values, gradients, self._descents)
            return
        beta1, beta2 = BETAS
        correction1, correction2_sqrt = self._corrections()
        torch._foreach_lerp_(self._averages, gradients, 1 - beta1)
        torch._foreach_mul_(self._squares, beta2)
        torch._foreach_addcmul_(self._squares, gradients, gradients, value=1 - beta2)
        denominators = torch._foreach_sqrt(self._squares)
        torch._foreach_div_(denominators, correction2_sqrt)
        torch._foreach_add_(denominators, EPS)
        torch._foreach_mul_(denominators, correction1)
        changes = torch._foreach_div(self._averages, denominators)
        torch._foreach_mul_(self._values, self._keeps)
        torch._foreach_addcmul_(self._values, changes, self._descents)

    def update_each(self, gradients: list[Tensor]) -> None:
        """Parameter after parameter: ``torch.compile`` fuses this best."""
        if self._setup.optimizer == "sgd":
            for value, gradient, descent in zip(self._values, gradients, self._descents, strict=True):
                value.addcmul_(gradient, descent)
            return
        beta1, beta2 = BETAS
        correction1, correction2_sqrt = self._corrections()
        for value, gradient, average, square, keep, descent in zip(
            self._values, gradients, self._averages, self._squares, self._keeps, self._descents, strict=True
        ):
            average.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square.sqrt() / correction2_sqrt + EPS) * correction1
            value.mul_(keep).addcmul_(average / denominator, descent)

    def _corrections(self) -> tuple[Tensor, Tensor]:
        self._num_steps.add_(1)  # on the device, for CUDA graphs
        return 1 - BETAS[0] ** self._num_steps, (1 - BETAS[1] ** self._num_steps).sqrt()


def _refresh_flat_weights(module: nn.Module, arguments: Any) -> None:
    """A recurrent layer reads its weights from a list of its own, which ``functional_call`` leaves alone."""
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _compute_norms_in_fp32(model: nn.Module) -> bool:
    """Cast inputs of normalisation layers to fp32; false where there are none.

    Results of batch norm go back to bf16, as they would without this; those of layer norm are fp32 anyway.
    """
    batch_norm = nn.modules.batchnorm._BatchNorm
    norms = [each for each in model.modules() if isinstance(each, (batch_norm, nn.LayerNorm, nn.GroupNorm))]
    for module in norms:
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))
        if isinstance(module, batch_norm):
            module.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    return bool(norms)
