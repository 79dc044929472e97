"""``python -m benchmarks adapters``: LoRA adapters on one frozen base, as a fleet, alone, or as one batch.

The base is a Llama without pretrained weights, the adapters are PEFT's. ``compiled_graph`` trains one
adapter with its own batch, ``ceiling`` one with the batches of all: no fleet can be faster per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import trainmux as tm

from .environment import choose_device, describe
from .processes import guarded, isolated
from .records import Results
from .timing import summary, time_blocks, used_bytes
from .ways import Setup, prepare_compiled, prepare_eager, prepare_fleet

SIZES: dict[str, dict[str, int]] = {
    "7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}
"""Sizes of Llama 2 7B, of TinyLlama 1.1B, and one for a CPU."""
VOCAB_SIZE = {"7b": 32000, "1b": 32000, "tiny": 64}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_BATCHES = 3
WAYS = ("trainmux", "compiled_graph", "ceiling")


def base_model(size: str) -> nn.Module:
    """A Llama in bfloat16, all of it frozen later."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[size], vocab_size=VOCAB_SIZE[size], use_cache=False)
    model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model


def adapted(base: nn.Module, rank: int, seed: int) -> nn.Module:
    """One LoRA adapter in fp32 over the shared base, in training mode; its second factor is not zero."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(tm.share_frozen(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.01)
    return model.train()


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    value: Tensor = model(input_ids=tokens, labels=tokens).loss
    return value


def measure(
    way: str, size: str, ranks: Sequence[int], batch: int, length: int, device: str, block_seconds: float
) -> dict[str, Any]:
    """Milliseconds per adapter and step, and device memory, of one way."""
    place = torch.device(device)
    before = used_bytes(place)
    base = base_model(size)
    num_adapters = len(ranks)
    shape = {
        "trainmux": (num_adapters, batch, length),
        "compiled_graph": (batch, length),
        "ceiling": (num_adapters * batch, length),
    }[way]
    used = list(ranks) if way == "trainmux" else [max(ranks)]
    models = [adapted(base, rank, seed) for seed, rank in enumerate(used)]
    batches = [
        torch.randint(VOCAB_SIZE[size], shape, generator=torch.Generator().manual_seed(seed)).to(place)
        for seed in range(NUM_BATCHES)
    ]
    setup = Setup(models, loss, batches[0], place, {"data": "per_member"} if way == "trainmux" else {})
    prepare = prepare_fleet if way == "trainmux" else prepare_compiled if device == "cuda" else prepare_eager
    step, notes = prepare(setup)
    first = step(batches[0]).tolist()
    seconds = time_blocks(step, batches, place, 5, block_seconds)
    adapters = sum(p.numel() * p.element_size() for p in models[0].parameters() if p.requires_grad)
    return {
        **summary(seconds, 1 if way == "compiled_graph" else num_adapters),
        "first_losses": first,
        "last_losses": step(batches[0]).tolist(),
        "device_bytes": used_bytes(place) - before,
        "base_bytes": sum(p.numel() * p.element_size() for p in base.parameters()),
        "adapter_bytes": adapters,
        "notes": notes,
    }


def command(
    size: Annotated[str, typer.Option(help=f"Of the base: {', '.join(SIZES)}.")] = "1b",
    adapters: Annotated[str, typer.Option(help="ADAPTERSxBATCHxLENGTH, with commas.")] = "8x2x512,16x1x128",
    ranks: Annotated[str, typer.Option(help="Repeated until there is one for each adapter.")] = "16",
    ways: Annotated[str, typer.Option(help="With commas.")] = ",".join(WAYS),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    block_seconds: Annotated[float, typer.Option(help="Seconds of a block of steps.")] = 0.3,
    limit: Annotated[float, typer.Option(help="Seconds that one way may take.")] = 300.0,
    out: Annotated[Path, typer.Option(help="File of results; rows measured before stay.")] = Path(
        "runs/bench/adapters.json"
    ),
) -> None:
    """Time adapters on one base: as a fleet, one by one, and as one adapter with the whole batch."""
    place = choose_device(device)
    results = Results(out, "adapters", describe(place) if place == "cpu" else isolated(describe, place))
    given = [int(rank) for rank in ranks.split(",")]
    for shape in adapters.split(","):
        count, batch, length = map(int, shape.split("x"))
        chosen = (given * count)[:count]
        for way in ways.split(","):
            what = (way, size, chosen, batch, length, place, block_seconds)
            row = guarded(measure, *what) if place == "cpu" else isolated(measure, *what, limit_s=limit)
            name = {"size": size, "adapters": count, "batch_size": batch, "length": length, "ranks": ranks}
            results.add({**name, "way": way, **row})
            told = f"{row['median_ms']:.4g} ms per adapter" if "median_ms" in row else row["error"]
            print(f"{size}, {shape}, ranks {ranks}, {way}: {told}", flush=True)
    print(f"written to {out}")
