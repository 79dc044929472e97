"""The matrix: every model, optimizer, setting and way to train, in fp64, equal to plain torch one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import SMALL
from equivalence import PLAIN, check, in_two_groups
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    OPTIMIZERS,
    SCHEDULERS,
    TOLERANCE,
    adam,
    assert_alone,
    assert_close,
    assert_trains_alone,
    mlp,
    mse,
    mse_any,
    sgd,
    sgd_member,
    state_of,
    train,
    train_alone,
    vectors,
)
from odd_models import ODD
from short_workloads import SHORT
from torch import Tensor, distributions, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

MODELS = {**{name: SHORT[name] for name in PLAIN}, **ODD}
RELATIVES = ("residual", "bottleneck", "mobilenet", "lstm_untied", "lstm_translation", "dlrm_joint")
RELATIVES += ("bert_mlm", "bert_nsp", "vit", "encoder_layer")
"""Models with a near relative among the others, and no operator of their own."""

CLASSES = [name for name in OPTIMIZERS if name != "last-layer"]


def every_model() -> list[Any]:
    """Each model with one optimizer, in turn."""
    found = []
    for number, name in enumerate(MODELS):
        marks = [pytest.mark.extensive] if name in RELATIVES else []
        optimizer = CLASSES[number % len(CLASSES)] if name in ODD or number % 2 else "adamw"
        found.append(pytest.param(name, optimizer, marks=marks, id=f"{name}-{optimizer}"))
    return found


@pytest.mark.parametrize(("name", "optimizer"), every_model())
def test_every_model_trains_as_alone(name: str, optimizer: str) -> None:
    check(MODELS[name], optimizer=OPTIMIZERS[optimizer], num_steps=4)


MOVED = ("sgd-momentum", "adam-amsgrad", "adagrad")
"""Optimizers with one buffer, with several and a count, and with state from the start."""


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[] if name in MOVED else [pytest.mark.extensive])
        for name in CLASSES
        if name != "param-groups"
    ],
)
def test_every_optimizer_trains_as_alone_and_moves_between_plain_torch_and_a_fleet(optimizer: str) -> None:
    """Settings by member and param group; state and step counts go in with the member, and come back."""
    check(SMALL["mlp"], optimizer=in_two_groups(OPTIMIZERS[optimizer]), plain_steps=2)


# ---- settings ------------------------------------------------------------------------------------------

CLIPS: list[dict[str, float]] = [
    {},
    {"clip_norm": 0.05},
    {"clip_value": 0.01},
    {"clip_norm": 1e6},
    {"clip_norm": 0.5, "clip_value": 0.02},
    {"clip_norm": math.inf},
]


def clip(member: tm.Member, number: int) -> None:
    for name, value in CLIPS[number].items():
        setattr(member, name, value)


def schedule(member: tm.Member, number: int) -> None:
    member.scheduler = list(SCHEDULERS.values())[number](member.optimizer)


ALL_CLIPS = {"settings": clip, "num_members": len(CLIPS), "optimizer": OPTIMIZERS["sgd"]}
ALL_SCHEDULES = {"settings": schedule, "num_members": len(SCHEDULERS), "num_steps": 11}
FOUR = {"num_members": 4, "num_steps": 4, "settings": clip}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "clipping": ("mlp", ALL_CLIPS),
    "clipping counts what the optimizer does not hold": (
        "mlp",
        {**ALL_CLIPS, "optimizer": OPTIMIZERS["last-layer"]},
    ),
    "clipping one gradient of several parameters": ("shares_gradient", {"settings": clip}),
    "clipping what is a metric, too": ("one_value_returned_thrice", {"settings": clip}),
    "parameters outside the optimizer pass gradients on": ("tied", {"optimizer": OPTIMIZERS["last-layer"]}),
    "parameters without gradients and weight decay": ("partly_frozen", {"settings": clip}),
    "accumulation": ("cnn", {"accumulate": 3, "num_steps": 6, "settings": clip}),
    "schedules": ("mlp", ALL_SCHEDULES),
    "schedules of param groups": (
        "mlp",
        {**ALL_SCHEDULES, "optimizer": in_two_groups(OPTIMIZERS["sgd-momentum"])},
    ),
    "schedules count updates": ("mlp", {**ALL_SCHEDULES, "accumulate": 2, "num_steps": 6}),
    "one member": ("mlp", {"num_members": 1}),
    "many steps": ("mlp", {"num_members": 6, "num_steps": 50}),
    "many steps of batch norm": ("cnn", {"num_steps": 15}),
    # A mask that differs between members, ragged bags in a dataclass, and batch norm.
    **{f"own batches: {name}": (name, {"data": "per_member"}) for name in ("transformer", "dlrm")},
    "own batches in sub-arrays": ("cnn", {"data": "per_member", "width": 2, **FOUR}),
    "width 1": ("mlp", {"width": 1, **FOUR}),
    "width 2 and accumulation": ("mlp", {"width": 2, "accumulate": 2, **FOUR}),
    "two branches": ("mlp", {"width": 2, "branches": 2, **FOUR}),
    "a width that does not divide": ("mlp", {"width": 3, "branches": 1, **FOUR}),
    "more branches than sub-arrays": ("mlp", {"width": 4, "branches": 3, **FOUR}),
    "a width beyond the group": ("mlp", {"width": 9, **FOUR}),
    **{
        f"{way}: {name}": (name, {"way": way, "num_steps": 3})
        for way, name in (("planned", "one_element"), ("job", "mlp"))
    },
}


@pytest.mark.parametrize("row", ROWS)
def test_every_setting_and_way_trains_as_alone(row: str) -> None:
    name, settings = ROWS[row]
    check(MODELS[name], **settings)


def test_the_norm_is_that_of_the_gradient_before_clipping() -> None:
    fleet = tm.Fleet([sgd_member(i, **CLIPS[i]) for i in range(len(CLIPS))], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    for i, found in enumerate(fleet.metrics["grad_norm"]):
        model = mlp(i)
        mse(model, EXAMPLE).backward()
        expected = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=0.0)


def test_accumulation_of_a_double_model_in_a_fleet_of_singles() -> None:
    """``precision="fp32"`` leaves a model its own dtype: a third must then be a third in fp64."""

    def make(i: int) -> tm.Member:
        return sgd(mlp(i, dtype=(torch.float32, torch.float64)[i]), f"m{i}")

    fleet = tm.Fleet([make(i) for i in range(2)], mse_any, EXAMPLE, accumulate=3)
    train(fleet, BATCHES[:3])
    assert_alone(fleet, (make(1), BATCHES[:3]), loss=mse_any, accumulate=3)


def test_a_model_in_single_precision_held_in_double() -> None:
    """``precision="fp64"`` trains in doubles; what comes back has the model's own dtype."""
    single, double = adam(mlp(0, torch.float32), "single"), adam(mlp(0, torch.float32).double(), "double")
    batches = [vectors(seed, dtype=torch.float32) for seed in range(3)]
    fleet = tm.Fleet([single], mse, batches[0], precision="fp64")
    losses = torch.cat([fleet.step(batch) for batch in batches])
    assert losses.dtype == torch.float64
    expected = train_alone(double, [(x.double(), y.double()) for x, y in batches])
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    fleet.sync()
    got = state_of(single)
    rounded = {key: value.to(got[key].dtype) for key, value in state_of(double).items()}
    assert_close(got, rounded, share=1e-7)
    assert len(tm.Fleet([single, double], mse, batches[0], precision="fp64").summary()) == 1


def test_the_members_own_tensors_stay_the_same_objects() -> None:
    """Whoever holds a parameter (an optimizer, a tied layer, a logger) sees the new values in it."""
    member = sgd_member(0)
    held = list(member.model.parameters())
    pointers = [parameter.data_ptr() for parameter in held]
    fleet = tm.Fleet([member, sgd_member(1)], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    fleet.sync()
    assert all(a is b for a, b in zip(member.model.parameters(), held, strict=True))
    assert [parameter.data_ptr() for parameter in held] == pointers
    assert all(parameter.grad is None and parameter.requires_grad for parameter in held)
    assert member.optimizer.param_groups[0]["params"] == held


# ---- hooks on gradients are part of the graph ----------------------------------------------------------


def every(*hooks: object) -> None:
    """Hooks that are registered together, in this order."""


HOOKS: list[Callable[[Any, Any], object]] = [
    lambda m, o: m[0].weight.register_hook(lambda gradient: gradient * torch.eye(4, 3, dtype=gradient.dtype)),
    lambda m, o: [p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)) for p in m.parameters()],
    lambda m, o: every(
        m[2].bias.register_hook(lambda gradient: gradient + 1.0),
        m[2].bias.register_hook(lambda gradient: gradient * 0.5),
    ),
    lambda m, o: m[2].weight.register_hook(lambda gradient: gradient + 0.1 * m[2].weight.detach()),
    lambda m, o: every(
        m[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,)),
        m[1].register_forward_hook(lambda module, inputs, output: output * 2),
    ),
    # Of the last three, nothing is left that changes the graph.
    lambda m, o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),  # which wraps the optimizer's step
    lambda m, o: m[0].weight.register_hook(lambda gradient: gradient * 0).remove(),
    lambda m, o: None,
]


def test_hooks_of_gradients_and_modules_are_honoured() -> None:
    def make(i: int) -> tm.Member:
        member = sgd_member(i)
        HOOKS[i](member.model, member.optimizer)
        return member

    with pytest.warns(tm.TrainmuxWarning, match="train apart"):
        fleet = tm.Fleet([make(i) for i in range(len(HOOKS))], mse, EXAMPLE)
    assert [group.members for group in fleet.summary()] == [
        *((f"m{i}",) for i in range(5)),
        ("m5", "m6", "m7"),
    ]
    assert_trains_alone(fleet, make, BATCHES[:3])


# ---- tools of torch in losses, and all that a batch may hold -------------------------------------------

Loss = Callable[[nn.Module, Any], Tensor]
PRIOR = distributions.Normal(0.0, 1.0)
compiled_mse = torch.compile(F.mse_loss, backend="eager")


def normal(model: nn.Module, batch: Any) -> Tensor:
    mean = model(batch[0])
    fitted = -distributions.Normal(mean, 1.3, validate_args=True).log_prob(batch[1]).mean()
    return fitted + distributions.kl_divergence(distributions.Normal(mean, mean.exp()), PRIOR).mean()


def categorical(model: nn.Module, batch: Any) -> Tensor:
    found = distributions.Categorical(logits=model(batch[0]))
    return -found.log_prob((batch[1][:, 0] > 0).long()).mean() - found.entropy().mean()


def compiled(model: nn.Module, batch: Any) -> Tensor:
    """In plain torch its first call compiles it: the fleet's must come before."""
    return compiled_mse(model(batch[0]), batch[1])  # type: ignore[no-any-return]


def by_name(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def by_order(model: nn.Module, batch: Any) -> Tensor:
    first, second = batch.values()
    return model(first).square().mean() + (model(second) * 3).mean()


def named(seed: int, **others: Any) -> dict[str, Any]:
    x, y = vectors(seed)
    return {"x": x, "y": y, **others}


def inputs_by(seed: int, *keys: str) -> dict[str, Tensor]:
    return {key: vectors(seed + ord(key))[0] for key in keys}


TOOLS: dict[str, tuple[Loss, list[Any]]] = {
    "normal": (normal, BATCHES[:2]),
    "categorical": (categorical, BATCHES[:2]),
    "compiled": (compiled, BATCHES[:2]),
    "another size": (mse, [*BATCHES[:2], vectors(50, size=2), BATCHES[3], vectors(51, size=2), BATCHES[4]]),
    "keys in any order": (by_name, [named(0), dict(reversed(named(1).items())), named(2)]),
    "code that goes by the order of keys": (
        by_order,
        [inputs_by(0, "a", "b"), inputs_by(1, "b", "a"), inputs_by(2, "a", "b")],
    ),
    "text that nobody reads": (
        by_name,
        [named(seed, file="fg"[:seed], files=["a"] * (seed + 1)) for seed in range(3)],
    ),
}


@pytest.mark.parametrize("kind", TOOLS)
def test_losses_and_batches_of_any_kind_train_as_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first torch.compile of a process switches these checks off for all of it.
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    loss, batches = TOOLS[kind]
    fleet = tm.Fleet([sgd_member(i) for i in range(2)], loss, batches[0])
    assert_trains_alone(fleet, sgd_member, batches, mse if kind == "compiled" else loss)
    with pytest.raises(ValueError, match="scale"):
        distributions.Normal(0.0, -1.0)


def test_compiled_models_train_as_what_they_were_made_of() -> None:
    members = [sgd_member(i) for i in range(2)]
    given = [tm.Member(torch.compile(m.model, backend="eager"), m.optimizer, m.name) for m in members]  # type: ignore[arg-type]
    fleet = tm.Fleet(given, mse, EXAMPLE)
    assert len(fleet.summary()) == 1
    train(fleet, BATCHES[:2])
    fleet.sync()
    for i, member in enumerate(members):
        alone = sgd_member(i)
        train_alone(alone, BATCHES[:2])
        assert_close(state_of(member), state_of(alone))


USES: dict[str, Callable[[Any], Any]] = {
    "equal": lambda text: text == "double",
    "kind": lambda text: isinstance(text, str) and len(text) == 6,
    "truth": lambda text: bool(text) and text.startswith("d"),
    "key": lambda text: {"double": True}.get(text),
    "part": lambda text: text in "a double",
    "format": lambda text: f"{text}" == "double",
    "joined": lambda text: "".join([text]) == "double",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_text_that_is_read_is_part_of_the_batch(use: Callable[[Any], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return by_name(model, batch) * (2 if use(batch["mode"]) else 1)

    fleet = tm.Fleet([sgd_member(0)], loss, named(0, mode="double"))
    assert_trains_alone(fleet, sgd_member, [named(1, mode="double")], loss)
    with pytest.raises(tm.BatchError):
        fleet.step(named(1, mode="single"))


def test_text_that_only_a_metric_reads() -> None:
    def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {batch["mode"]: by_name(model, batch)}

    batch = named(0, mode="error")
    fleet = tm.Fleet([sgd_member(0)], by_name, batch)
    fleet.step(named(0, mode="other"))
    fleet.sync()
    expected = by_name(fleet.members[0].model, batch).item()
    for _ in range(2):
        assert fleet.evaluate([batch], metric)["m0"]["error"] == pytest.approx(expected, rel=TOLERANCE)
    assert torch.isfinite(fleet.step(batch)).all()


def test_a_weight_in_the_closure_of_a_loss_is_the_one_that_trains() -> None:
    member, plain = sgd_member(0), sgd_member(0)

    def with_penalty(weight: Tensor) -> Any:
        return lambda model, batch: mse(model, batch) + weight.square().sum()

    fleet = tm.Fleet([member], with_penalty(member.model[0].weight), EXAMPLE)
    train(fleet, BATCHES[:4])
    assert_alone(fleet, (plain, BATCHES[:4]), loss=with_penalty(plain.model[0].weight))
