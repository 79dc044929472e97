"""PEFT as shipped: many adapters on one base train as alone, and load into plain PEFT afterwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads.seeding import seeded
from fleet_cases import TOLERANCE, copies_of, train_alone
from torch import Tensor, nn

import trainmux as tm

peft = pytest.importorskip("peft", reason="needs peft")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

VOCABULARY = 43


def gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=12,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return seeded(transformers.GPT2LMHeadModel, config=config)(3).to(dtype).train()


def lora(rank: int = 3, **options: Any) -> Any:
    usual = {"lora_alpha": 2 * rank, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    return peft.LoraConfig(r=rank, task_type="CAUSAL_LM", **(usual | options))


def prompts() -> Any:
    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


def adapters(base: nn.Module, configs: Sequence[Any]) -> list[tm.Member]:
    members = []
    for number, config in enumerate(configs):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            model = peft.get_peft_model(tm.share_frozen(base), config)
            learning = [item for item in model.parameters() if item.requires_grad]
            for parameter in learning:  # not in single precision on a wide base, and none begins at zero
                wide = torch.promote_types(parameter.dtype, next(base.parameters()).dtype)
                parameter.data = parameter.data.to(wide)
                parameter.data += 0.05 * torch.randn_like(parameter)
        members.append(tm.Member(model, torch.optim.AdamW(learning, 0.01 * (number + 1)), f"m{number}"))
    return members


def next_token(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, -tokens.shape[1] :]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (2, 6), generator=generator) for _ in range(num)]


def assert_trains_as_alone(fleet: tm.Fleet, plain: list[tm.Member], rtol: float = TOLERANCE) -> None:
    """The losses of three steps are those of the same members in plain torch."""
    losses = torch.stack([fleet.step(tokens) for tokens in batches(3)], 1)
    alone = [train_alone(member, batches(3), next_token) for member in plain]
    torch.testing.assert_close(losses, torch.tensor(alone, dtype=losses.dtype), rtol=rtol, atol=0)


def assert_same_adapters(got: nn.Module, expected: nn.Module) -> None:
    pairs = list(zip(got.named_parameters(), expected.named_parameters(), strict=True))
    assert any(one.requires_grad for (_, one), _ in pairs)
    for (name, one), (_, other) in pairs:
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=1e-13, msg=name)


@pytest.mark.slow
def test_lora_of_other_ranks_and_targets_on_one_base(tmp_path: Path) -> None:
    base = gpt()
    embedding = base.get_parameter("transformer.wte.weight")
    configs = [lora(2), lora(5), lora(3, target_modules=["c_fc"]), lora(3, use_rslora=True, lora_alpha=3)]
    members, plain = adapters(base, configs), adapters(gpt(), configs)
    before = copies_of(embedding)
    fleet = tm.Fleet(members, next_token, batches(1)[0])
    groups = [group.members for group in fleet.summary()]
    assert groups == [("m0", "m1", "m3"), ("m2",)]  # ranks and scales share a group, other targets do not
    assert_trains_as_alone(fleet, plain)
    assert copies_of(embedding) == before
    fleet.sync()
    for member, alone in zip(fleet.members, plain, strict=True):
        assert_same_adapters(member.model, alone.model)
    # Into plain PEFT, on a base of its own.
    members[0].model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = peft.PeftModel.from_pretrained(gpt(), tmp_path, autocast_adapter_dtype=False)
    tokens = batches(4)[3]
    with torch.no_grad():
        got, expected = (next_token(model.eval(), tokens) for model in (loaded, plain[0].model))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)  # files have what is in single precision


SAME_GROUP = {
    "prompts": [prompts(), prompts()],
    "prefixes": [peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)] * 2,
    "DoRA of two ranks": [lora(2, use_dora=True), lora(4, use_dora=True)],
    "two ranks of an embedding": [lora(2, target_modules=["wte"]), lora(4, target_modules=["wte"])],
    "a head that learns, too": [lora(rank, modules_to_save=["lm_head"]) for rank in (2, 4)],
    "ranks by layer": [
        lora(2, target_modules=["c_attn", "c_fc"], rank_pattern={"c_fc": 6}, alpha_pattern={"c_fc": 12}),
        lora(4, target_modules=["c_attn", "c_fc"]),
    ],
}


ONE_MORE = ("prompts", "a head that learns, too")
"""Of kinds near to others: prompts are short prefixes, and the head of the probes learns, too."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.extensive] if kind in ONE_MORE else []) for kind in SAME_GROUP],
)
def test_adapters_of_one_kind_share_a_group_and_train_as_alone(kind: str) -> None:
    configs = SAME_GROUP[kind]
    fleet = tm.Fleet(adapters(gpt(), configs), next_token, batches(1)[0])
    assert len(fleet.summary()) == 1
    assert_trains_as_alone(fleet, adapters(gpt(), configs))


def test_adapters_in_single_precision_on_a_base_of_half(tmp_path: Path) -> None:
    """Which stays half, and is not saved with a member."""
    base = gpt(torch.bfloat16)
    values = copy.deepcopy(base.state_dict())
    fleet = tm.Fleet(adapters(base, [lora(2), lora(4)]), next_token, batches(1)[0])
    assert_trains_as_alone(fleet, adapters(gpt(torch.bfloat16), [lora(2), lora(4)]), rtol=2e-2)
    fleet.save_member("m0", tmp_path)
    fleet.sync()
    for member in fleet.members:
        assert {item.dtype for item in member.model.parameters() if item.requires_grad} == {torch.float32}
    for name, value in base.state_dict().items():
        assert torch.equal(value, values[name])
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size < 20_000
