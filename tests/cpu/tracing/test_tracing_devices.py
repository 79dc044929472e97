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


def devices(module: fx.GraphModule) -> set[str]:
    values = [node.meta.get("val") for node in module.graph.nodes]
    given = [node.kwargs["device"].type for node in module.graph.nodes if "device" in node.kwargs]
    return {value.device.type for value in values if isinstance(value, Tensor)} | set(given)


def test_a_step_of_another_device_has_nothing_on_the_cpu() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make_fx(made_on_the_cpu)(torch.empty(4))
    move_to(module, META)
    assert devices(module) == {"meta"}
    assert module(torch.empty(4, device=META)).device == META  # would refuse operands of two devices
