"""All members in one ``vmap``: HFTA's horizontal fusion by torch's own means, as its tutorials show it.

The members' parameters and buffers are stacked by ``torch.func.stack_module_state``; one function computes
loss and gradients of a member, and ``vmap`` runs it over the stack, on one batch for all. Eager, or compiled
and captured as a CUDA graph.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from ..batches import StaticBatch, to_device
from ._base import AUTOCAST_DTYPE, Prepared, Setup, autocast
from ._capture import capture
from ._stacked_adamw import make_state, update_foreach, update_plain

NORMS_IN_FP32 = "vmap fails on the model's normalisation layers under autocast: they compute in fp32"
NO_CUDNN_ATTENTION = "compiled, it fails with cuDNN's attention: other kernels compute that"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


class _WithLoss(nn.Module):
    """A model whose output is its loss, so that the loss sees the model itself, with swapped tensors."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


class _Stack:
    """Stacked members, and loss and gradients of all of them on one batch."""

    def __init__(self, setup: Setup) -> None:
        models = [_WithLoss(model.train(), setup.loss) for model in setup.models]
        parameters, buffers = stack_module_state(models)
        self._device = setup.device
        self.parameters = {name: _held(value, setup.device) for name, value in parameters.items()}
        self.buffers = {name: _held(value, setup.device) for name, value in buffers.items()}
        # A copy on the same device: taken to torch's meta device, tied weights would no longer be tied.
        self._skeleton = copy.deepcopy(models[0]).to(setup.device)
        for module in self._skeleton.modules():
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(_refresh_flat_weights)
        self.notes = self._work_around(to_device(setup.example, setup.device))

    def losses_and_gradients(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        return self._of(self.parameters, self.buffers, batch)

    def _of(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, list[Tensor]]:
        def loss_of_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            loss: Tensor = functional_call(self._skeleton, (parameters, buffers), (batch,))
            return loss

        with autocast(self._device):
            gradients, losses = vmap(grad_and_value(loss_of_one), randomness="different")(parameters, buffers)
        return losses, list(gradients.values())

    def _work_around(self, batch: Any) -> tuple[str, ...]:
        """Try a step without update; where normalisation under autocast fails, give it fp32 inputs.

        On a stack of the first member alone: it fails where all would, in a part of their memory.
        """
        parameters = {name: value[:1] for name, value in self.parameters.items()}
        buffers = {name: value[:1].clone() for name, value in self.buffers.items()}
        notes: tuple[str, ...] = ()
        try:
            self._of(parameters, buffers, batch)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _compute_norms_in_fp32(self._skeleton):
                raise
            notes = (_because(NORMS_IN_FP32, error),)
        if notes:  # not while the error is at hand, which holds on to tensors
            self._of(parameters, buffers, batch)
        if self._device.type == "cuda":  # others may be building beside this
            torch.cuda.empty_cache()
        return notes


def prepare_eager(setup: Setup) -> Prepared:
    """``vmap`` and a multi-tensor AdamW, operator after operator."""
    stack = _Stack(setup)
    state = make_state(list(stack.parameters.values()), setup.learning_rates)

    def step(batch: Any) -> Tensor:
        losses, gradients = stack.losses_and_gradients(to_device(batch, setup.device))
        update_foreach(state, gradients)
        return losses

    return Prepared(step, len(setup.models), stack.notes)


def prepare_captured(setup: Setup) -> Prepared:
    """The whole step, update included, by ``torch.compile``, then captured as one CUDA graph."""
    stack, train = make_compiled_step(setup)
    static = StaticBatch(setup.example, setup.device)
    notes: tuple[str, ...] = ()
    try:
        graph, losses = capture(lambda: train(static.tree), setup.device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        notes = (_because(NO_CUDNN_ATTENTION, error),)
    if notes:  # not while the error is at hand, which holds on to tensors
        _do_without_cudnn_attention()
        graph, losses = capture(lambda: train(static.tree), setup.device)

    def step(batch: Any) -> Tensor:
        static.load(batch)
        graph.replay()
        return losses

    return Prepared(step, len(setup.models), stack.notes + notes)


def make_compiled_step(setup: Setup, backend: str = "inductor") -> tuple[_Stack, Callable[[Any], Tensor]]:
    """The stacked members, and one compiled function that trains them on a batch on the device."""
    stack = _Stack(setup)
    state = make_state(list(stack.parameters.values()), setup.learning_rates)

    def train(batch: Any) -> Tensor:
        losses, gradients = stack.losses_and_gradients(batch)
        update_plain(state, gradients)
        return losses

    return stack, torch.compile(train, dynamic=False, backend=backend)


def _do_without_cudnn_attention() -> None:
    """From here on, in this process, which measures nothing else.

    torch finds compiled code on disk by what was compiled, not by what kernels were allowed then: it is given
    another folder.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.compiler.reset()
    os.environ[_COMPILED] = os.environ[_COMPILED] + "-again" if _COMPILED in os.environ else mkdtemp()


def _because(note: str, error: RuntimeError) -> str:
    """A note with the first line of what torch said."""
    said = str(error).strip() or type(error).__name__
    return f"{note} (torch: {said.splitlines()[0]})"


def _held(value: Tensor, device: torch.device) -> Tensor:
    return value.detach().to(device)


def _refresh_flat_weights(module: nn.Module, arguments: Any) -> None:
    """A recurrent layer reads its weights from a list of its own, which ``functional_call`` leaves alone."""
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _compute_norms_in_fp32(model: nn.Module) -> bool:
    """Cast what goes into normalisation layers to fp32; false where there are none.

    Batch norm's result goes back to the autocast dtype, as it would without this; layer norm's is fp32
    under autocast on CUDA anyway.
    """
    found = False
    for module in model.modules():
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_batch_norm or isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))
            found = True
        if is_batch_norm:
            module.register_forward_hook(lambda module, inputs, output: output.to(AUTOCAST_DTYPE))
    return found
