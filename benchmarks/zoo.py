"""``python -m benchmarks zoo``: public architectures as fleets, compared with plain torch.

For each model of torchvision, timm or transformers that is installed: does it fuse, is its step captured as a
CUDA graph, are its losses those of plain torch, and how long is a step per member.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import trainmux as tm

from .cases import map_tensors, split
from .environment import choose_device, describe
from .processes import guarded, isolated
from .records import Results
from .timing import summary, time_blocks

NUM_STEPS = 5
"""Steps whose losses are compared: longer, and rounding errors grow by themselves."""
LEARNING_RATE = 1e-4
MODELS = (
    *(
        "torchvision:resnet18",
        "torchvision:convnext_tiny",
        "torchvision:efficientnet_b0",
        "torchvision:swin_t",
    ),
    *("timm:vit_small_patch16_224", "timm:mixer_s32_224", "timm:regnety_002", "timm:mobilenetv4_conv_small"),
    *("transformers:bert", "transformers:gpt2", "transformers:llama", "transformers:distilbert"),
    *("transformers:t5", "transformers:gpt_neox", "transformers:mamba"),
)
TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
"""Small sizes for text models; a configuration takes those that it knows."""


def build(name: str, batch_size: int) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]:
    """Make a model without pretrained weights, with its loss and a batch."""
    library, _, model_name = name.partition(":")
    torch.manual_seed(0)
    if library == "transformers":
        import transformers

        config = transformers.AutoConfig.for_model(model_name)
        for field, value in TEXT.items():
            if hasattr(config, field):
                setattr(config, field, value)
        config.use_cache = False
        _without_dropout(config)
        masked = model_name in ("bert", "distilbert")
        kind: Any = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            kind = transformers.AutoModelForSeq2SeqLM
        tokens = torch.randint(TEXT["vocab_size"], (batch_size, 32))
        model = kind.from_config(config)
        return model, lambda model, batch: model(**batch).loss, {"input_ids": tokens, "labels": tokens}
    if library == "torchvision":
        import torchvision

        model = torchvision.models.get_model(model_name, weights=None)
    else:
        import timm

        model = timm.create_model(model_name, pretrained=False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    images = torch.randn(batch_size, 3, 224, 224), torch.randint(1000, (batch_size,))
    return model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), images


def measure(name: str, width: int, batch_size: int, device: str, block_seconds: float) -> dict[str, Any]:
    """Train as a fleet and one by one from the same weights, compare the losses, time both."""
    place = torch.device(device)
    built, loss, batch = build(name, batch_size)
    batch = map_tensors(lambda tensor: tensor.to(place), batch)
    alone = [copy.deepcopy(built).to(place).train() for _ in range(width)]
    rates = [LEARNING_RATE * (1 + number) for number in range(width)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr) for model, lr in zip(alone, rates, strict=True)]

    def step_alone(batch: Any) -> Tensor:
        losses = []
        for model, optimizer in zip(alone, optimizers, strict=True):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            losses.append(value.detach())
        return torch.stack(losses)

    members = []
    for lr in rates:
        model = copy.deepcopy(built).train()
        members.append(tm.Member(model, torch.optim.AdamW(model.parameters(), lr)))
    lowering = "inductor" if place.type == "cuda" else "aten"
    fleet = tm.Fleet(members, loss, batch, device=device, lowering=lowering)
    pairs = [(fleet.step(batch).clone(), step_alone(batch)) for _ in range(NUM_STEPS)]
    (group,) = fleet.summary()
    return {
        "num_parameters": sum(parameter.numel() for parameter in built.parameters()),
        "fused_width": group.width,
        "unfused_because": group.unfused_because,
        "is_captured": group.memory is not None,
        "loss_difference": max((ours - theirs).abs().max().item() for ours, theirs in pairs),
        "step_ms": summary(time_blocks(fleet.step, [batch], place, 3, block_seconds), width)["median_ms"],
        "alone_ms": summary(time_blocks(step_alone, [batch], place, 3, block_seconds), width)["median_ms"],
    }


def command(
    models: Annotated[str, typer.Option(help="LIBRARY:NAME, with commas.")] = ",".join(MODELS),
    members: Annotated[int, typer.Option(min=1, help="Models to train at once.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Of each member.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    block_seconds: Annotated[float, typer.Option(help="Seconds of a block of steps.")] = 0.3,
    limit: Annotated[float, typer.Option(help="Seconds that one model may take.")] = 300.0,
    out: Annotated[Path, typer.Option(help="File of results; rows measured before stay.")] = Path(
        "runs/bench/zoo.json"
    ),
) -> None:
    """Train public architectures as fleets: do they fuse, match plain torch, and how fast are they."""
    place = choose_device(device)
    results = Results(out, "zoo", describe(place) if place == "cpu" else isolated(describe, place))
    for name in split(models):
        what = (name, members, batch_size, place, block_seconds)
        row = guarded(measure, *what) if place == "cpu" else isolated(measure, *what, limit_s=limit)
        results.add({"model": name, "width": members, "batch_size": batch_size, **row})
        print(name, {key: value for key, value in row.items() if key != "detail"}, flush=True)
    print(f"written to {out}")


def _without_dropout(config: Any) -> None:
    for field, value in vars(config).items():
        if ("dropout" in field or field.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, field, 0.0)
