"""What user code makes on the CPU is computed where the step runs."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from trainmux.tracing import FakeTensorMode, make_fx, move_to

META = torch.device("meta")
TABLE = torch.tensor([1.0, 2.0, 3.0, 4.0])


def made_on_the_cpu(x: Tensor) -> Tensor:
    """A constant, a range, a scalar, a filled tensor, and a value that is fetched and sent back."""
    places = torch.arange(4)
    scaled = x * TABLE.to(x.device) + places.float().log1p().to(x.device) + torch.tensor(2.0)
    fetched = x.cpu()[places]
    return scaled + fetched.to(x.device) + torch.ops.aten.scalar_tensor.default(1.0).to(x.device)


def traced(device: str) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, device=device)
        return make_fx(made_on_the_cpu)(x)


def devices(module: fx.GraphModule) -> set[str]:
    values = [node.meta.get("val") for node in module.graph.nodes]
    given = [node.kwargs["device"].type for node in module.graph.nodes if "device" in node.kwargs]
    return {value.device.type for value in values if isinstance(value, Tensor)} | set(given)


def test_a_step_of_another_device_has_nothing_on_the_cpu() -> None:
    module = traced("cpu")
    move_to(module, META)
    assert devices(module) == {"meta"}
    assert module(torch.empty(4, device=META)).device == META  # would refuse operands of two devices


def test_values_stay_what_they_were() -> None:
    module = traced("cpu")
    x = torch.linspace(-1, 1, 4)
    before = module(x)
    move_to(module, torch.device("cpu"))
    assert torch.equal(module(x), before)


def test_a_trace_for_a_gpu_has_values_on_the_cpu_before() -> None:
    assert devices(traced("cuda")) == {"cpu", "cuda"}
