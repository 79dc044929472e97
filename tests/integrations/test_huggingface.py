"""Trainers as members: they train as `transformers.Trainer` trains them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainmux as tm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:(peft|transformers|torch|accelerate)"),
]

VOCABULARY = 31
FLOAT = torch.float64


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Eight texts of six tokens, the ends of which are not learnt."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, VOCABULARY, (8, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        labels = self.tokens[number].clone()
        labels[6 - number % 3 :] = -100
        return {"input_ids": self.tokens[number], "labels": labels}


def gpt(seed: int) -> Any:
    options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = transformers.GPT2Config(**options, **sizes, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(config).to(FLOAT)


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    kept = targets.ne(-100)
    wanted = nn.functional.one_hot(targets.clamp(min=0), VOCABULARY)
    return ((logits - wanted).square().mean(-1) * kept).sum() / num_items_in_batch


class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
    """With a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def trainer(path: Path, seed: int, cls: Any = None, model: Any = None, **options: Any) -> Any:
    loss = {"compute_loss_func": options.pop("compute_loss_func")} if "compute_loss_func" in options else {}
    usual = {"learning_rate": 0.01 * (seed + 1), "num_train_epochs": 3, "per_device_train_batch_size": 8}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(str(path), seed=seed, **{**usual, **quiet, **options})
    return (cls or transformers.Trainer)(
        model=gpt(seed) if model is None else model, args=args, train_dataset=Texts(), **loss
    )


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (None, {"lr_scheduler_type": "cosine", "warmup_steps": 1}),
        (None, {"label_smoothing_factor": 0.1, "max_grad_norm": 0.05, "weight_decay": 0.1}),
        (None, {"compute_loss_func": squared, "lr_scheduler_type": "constant"}),
        (Own, {"max_steps": 2, "optim": "sgd"}),
    ],
)
def test_trainers_train_as_transformers_trains_them(tmp_path: Path, cls: Any, options: Any) -> None:
    """All rows are in one batch, so that their order does not matter."""
    expected = [trainer(tmp_path, seed, cls, **options) for seed in range(2)]
    for one in expected:
        one.train()
    trainers = [trainer(tmp_path, seed, cls, **options) for seed in range(2)]
    members = [tm.huggingface.member(one, f"m{i}") for i, one in enumerate(trainers)]
    loader = trainers[0].get_train_dataloader()
    fleet = tm.Fleet(members, example_batch=next(iter(loader)))
    assert len(fleet.groups) == 1
    fleet.fit(loader, epochs=options.get("max_steps", 3), progress=False)
    for one, other in zip(trainers, expected, strict=True):
        trained = other.model.state_dict()
        for name, value in one.model.state_dict().items():
            torch.testing.assert_close(value, trained[name], rtol=1e-7, atol=1e-9)
        assert one.lr_scheduler.get_last_lr() == pytest.approx(other.lr_scheduler.get_last_lr())
        assert not torch.equal(
            trained["transformer.wte.weight"], gpt(0).state_dict()["transformer.wte.weight"]
        )


def test_trainers_that_differ_in_smoothing_are_one_group(tmp_path: Path) -> None:
    trainers = [trainer(tmp_path, i, label_smoothing_factor=0.1 * (i + 1)) for i in range(2)]
    members = [tm.huggingface.member(one, f"m{i}") for i, one in enumerate(trainers)]
    batch = next(iter(trainers[0].get_train_dataloader()))
    fleet = tm.Fleet(members, example_batch=batch)
    assert fleet.groups == (("m0", "m1"),)
    losses = fleet.step(batch)
    for i, one in enumerate(trainers):
        alone = trainer(tmp_path, i, label_smoothing_factor=0.1 * (i + 1))
        _, count = alone.get_batch_samples(iter([batch]), 1, "cpu")
        expected = alone.compute_loss(alone.model, dict(batch), num_items_in_batch=count)
        assert losses[i].item() == pytest.approx(expected.item(), rel=1e-6)
        assert one.optimizer is members[i].optimizer


def test_adapters_of_one_base_are_trained_from_their_trainers(tmp_path: Path) -> None:
    """PEFT models as shipped: the base is held once, and each adapter trains as its Trainer trains it."""
    base = gpt(7)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")

    def adapted(seed: int, given: Any) -> Any:
        torch.manual_seed(seed)
        model = peft.get_peft_model(given, config)
        return model.to(FLOAT)

    options = {"optim": "adamw_torch", "label_smoothing_factor": 0.1}
    expected = [trainer(tmp_path, i, model=adapted(i, copy.deepcopy(base)), **options) for i in range(2)]
    for one in expected:
        one.train()
    shared = [adapted(i, tm.share_frozen(base)) for i in range(2)]
    trainers = [trainer(tmp_path, i, model=model, **options) for i, model in enumerate(shared)]
    loader = trainers[0].get_train_dataloader()
    members = [tm.huggingface.member(one, f"m{i}") for i, one in enumerate(trainers)]
    fleet = tm.Fleet(members, example_batch=next(iter(loader)))
    assert fleet.groups == (("m0", "m1"),)
    fleet.fit(loader, epochs=3, progress=False)
    weights = [one.get_base_model().transformer.wte.weight for one in shared]
    assert weights[0].data_ptr() == weights[1].data_ptr() == base.transformer.wte.weight.data_ptr()
    for model, other in zip(shared, expected, strict=True):
        trained = peft.get_peft_model_state_dict(other.model)
        for name, value in peft.get_peft_model_state_dict(model).items():
            torch.testing.assert_close(value, trained[name], rtol=1e-7, atol=1e-9)
    batch = {"input_ids": Texts().tokens}
    mean = tm.ensemble(fleet, output=lambda found: found.logits)(**batch)
    alone = [model.eval()(**batch).logits for model in shared]
    torch.testing.assert_close(mean, torch.stack(alone).mean(0), rtol=1e-10, atol=1e-12)


class Stepping(transformers.Trainer):  # type: ignore[misc, name-defined]
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tm.MemberError, match=r"expected a transformers.Trainer, got Linear"):
        tm.huggingface.member(nn.Linear(1, 1))
    with pytest.raises(tm.MemberError, match="Stepping: expected the training_step of a Trainer"):
        tm.huggingface.member(trainer(tmp_path, 0, Stepping))
    with pytest.raises(tm.ConfigError, match="expected neftune_noise_alpha to be off, got 5"):
        tm.huggingface.member(trainer(tmp_path, 0, neftune_noise_alpha=5))
    with pytest.raises(tm.ConfigError, match="num_steps: expected a whole number of at least 1, got 0"):
        tm.huggingface.member(trainer(tmp_path, 0), num_steps=0)
    with pytest.raises(tm.LossError, match=r"GPT2LMHeadModel to return a loss, got .* labels"):
        tm.Fleet([tm.huggingface.member(trainer(tmp_path, 0))], example_batch={"input_ids": Texts().tokens})
