"""Who is fused with whom, and what happens where fusing does not work."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    Slotted,
    adam,
    adam_member,
    assert_alone,
    assert_close,
    assert_same_states,
    assert_trains_alone,
    bn_mlp,
    coded,
    count_work,
    mlp,
    mse,
    mse_any,
    mse_with_metrics,
    sgd,
    sgd_member,
    state_of,
    states_of,
    train_alone,
    vectors,
)
from fleet_cases import dropout_member as bn_member
from torch import Tensor, nn

import trainmux.fleet._build as build_module
from trainmux import Fleet, Member
from trainmux.errors import BatchError, FusionError, TrainmuxWarning

pytestmark = pytest.mark.usefixtures("built_once")


def groups_of(fleet: Fleet) -> list[tuple[str, ...]]:
    return [group.members for group in fleet.summary()]


# ---- several groups in one fleet -----------------------------------------------------------------------


def rooted(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch).sqrt()


def assorted(i: int) -> Member:
    """Two architectures, two losses, two optimizers, two dtypes: member ``i`` of eight."""
    settings = {1: {"hidden": 7}, 5: {"dtype": torch.float32}, 6: {"hidden": 7}}.get(i, {})
    model = bn_mlp(i) if i == 3 else mlp(i, **settings)
    make = sgd if i in (2, 7) else adam
    return make(model, f"m{i}", 0.01 * (i + 1), loss=rooted if i == 4 else None)


def test_different_members_form_groups_and_train_as_alone() -> None:
    fleet = Fleet([assorted(i) for i in range(8)], mse_any, EXAMPLE)
    assert groups_of(fleet) == [("m0",), ("m1", "m6"), ("m2", "m7"), ("m3",), ("m4",), ("m5",)]
    losses = torch.stack([fleet.step(batch) for batch in BATCHES[:3]])
    assert losses.shape == (3, 8)
    assert losses.dtype == torch.float64
    states = states_of(fleet)
    for i, name in enumerate(fleet.names):
        alone = assorted(i)
        expected = train_alone(alone, BATCHES[:3], mse_any)
        share = 1e-6 if i == 5 else TOLERANCE
        assert losses[:, i].tolist() == pytest.approx(expected, rel=share)
        assert_close(states[name], state_of(alone), share=1e-5 if i == 5 else TOLERANCE)


def test_all_members_have_batches_of_their_own() -> None:
    def make(i: int) -> Member:
        return adam_member(i, example_batch=vectors(i, size=2 + i))

    fleet = Fleet([make(i) for i in range(2)], mse)
    batches = [[vectors(10 * i + n, size=2 + i) for n in range(3)] for i in range(2)]
    for first, second in zip(*batches, strict=True):
        fleet.step(overrides={"m0": first, "m1": second})
    assert_alone(fleet, *((make(i), batches[i]) for i in range(2)))


def test_overrides_that_are_missing_or_misshapen() -> None:
    own = vectors(40, size=2)
    fleet = Fleet([adam_member(0), *(adam_member(i, example_batch=own) for i in (1, 2))], mse, EXAMPLE)
    good = {"m1": own, "m2": own}
    fleet.step(EXAMPLE, good)
    before = states_of(fleet)
    bad = [
        (EXAMPLE, None),
        (EXAMPLE, {"m1": own}),
        (EXAMPLE, {**good, "m2": own[0]}),
        (EXAMPLE, {**good, "m2": (own[0].float(), own[1])}),
        (EXAMPLE, {**good, "m2": vectors(3, size=4)}),
        (EXAMPLE, {**good, "m0": EXAMPLE}),
        (None, good),
    ]
    for batch, overrides in bad:
        with pytest.raises(BatchError):
            fleet.step(batch, overrides)
    assert_same_states(states_of(fleet), before)
    assert fleet.num_steps == 1


def test_losses_and_metrics_have_a_row_per_member() -> None:
    """What only some members have is NaN for the rest; what has several shapes comes as a list."""

    def rows(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        error = model(batch[0]) - batch[1]
        return error.square().mean(), {"per_output": error.mean(1)}

    members = [adam_member(0), sgd_member(1), adam_member(2, loss=mse), adam_member(3, loss=rows)]
    fleet = Fleet(members, mse_with_metrics, EXAMPLE)
    assert fleet.metrics == {}
    losses, metrics = fleet.step(EXAMPLE), fleet.metrics
    assert set(metrics) == {"grad_norm", "finite", "largest", "per_output"}
    assert metrics["grad_norm"].shape == (4,)
    assert metrics["finite"].tolist() == [True] * 4
    assert torch.isnan(metrics["largest"]).tolist() == [False, False, True, True]
    shapes = [None if value is None else tuple(value.shape) for value in metrics["per_output"]]
    assert shapes == [(2,), (2,), None, (5,)]
    for i in range(2):
        loss, expected = mse_with_metrics(sgd_member(i).model, EXAMPLE)
        torch.testing.assert_close(losses[i], loss.detach(), rtol=TOLERANCE, atol=0.0)
        for name, value in expected.items():
            torch.testing.assert_close(metrics[name][i], value.detach(), rtol=TOLERANCE, atol=TOLERANCE)


# ---- who is fused with whom ----------------------------------------------------------------------------


def test_the_same_code_twice_is_one_group() -> None:
    """Each notebook cell has its own lambda: what counts is what it computes."""
    first = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    second = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731

    def third(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        difference = model(inputs) - targets
        return difference.square().mean()

    members = [adam_member(i, loss=loss) for i, loss in enumerate((first, second, third))]
    fleet = Fleet(members, None, EXAMPLE)
    assert groups_of(fleet) == [("m0", "m1", "m2")]
    assert_trains_alone(fleet, adam_member, BATCHES[:2])


def scaled_loss(factor: float) -> Callable[..., Tensor]:
    return lambda model, batch: factor * mse(model, batch)


def defaulted_loss(factor: float) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Any, factor: float = factor) -> Tensor:
        return factor * mse(model, batch)

    return loss


def test_closures_with_different_constants_share_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults of arguments count like closures, and the same constant is the same wherever it is kept."""
    work = count_work(monkeypatch)
    losses = (scaled_loss(1.5), scaled_loss(3.0), scaled_loss(1.5), defaulted_loss(3.0), defaulted_loss(1.5))

    def make(i: int) -> Member:
        return sgd_member(i, loss=losses[i])

    fleet = Fleet([make(i) for i in range(len(losses))], None, EXAMPLE)
    assert groups_of(fleet) == [("m0", "m1", "m2", "m3", "m4")]
    assert (work["traces"], work["fusions"]) == (4, 1)
    assert_trains_alone(fleet, make, BATCHES[:3])


def pair_of_layers(how: str) -> nn.Module:
    """Tied weights are not two weights, and one layer used twice is not two layers."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    if how == "tied":
        layers[1].weight = layers[0].weight
    return nn.Sequential(*([layers[0]] * 2 if how == "twice" else layers))


def hooked(factor: float) -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, inputs, output: factor * output)
    return layer


class Picks(nn.Module):
    """Keeps one of its own weights in a list, as recurrent layers do, or a constant that is no buffer."""

    def __init__(self, position: int | None, constant: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        weights = list(self.parameters())
        self.kept = [torch.full((3, 3), constant).double() if position is None else weights[position]]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)) + x @ self.kept[0]


KINDS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 3),
    lambda: nn.Linear(3, 3, bias=False),
    lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)),
    lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)),
    lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)),
    *(functools.partial(nn.BatchNorm1d, 3, momentum=momentum) for momentum in (0.1, None)),
    *(functools.partial(pair_of_layers, how) for how in ("apart", "tied", "twice")),
    functools.partial(hooked, 2.0),
    *(functools.partial(Picks, position) for position in (0, 1)),
    *(functools.partial(Picks, None, constant) for constant in (0.0, 1.0)),
]


def test_models_share_a_group_only_with_their_like() -> None:
    """Values of weights do not count; what a graph is made of does."""
    members = [sgd(make().double(), f"m{number}") for number, make in enumerate((*KINDS, *KINDS))]
    with pytest.warns(TrainmuxWarning, match="train apart"):
        fleet = Fleet(members, lambda model, batch: model(batch[0]).square().sum(), EXAMPLE)
    assert groups_of(fleet) == [(f"m{i}", f"m{i + len(KINDS)}") for i in range(len(KINDS))]


def test_a_newcomer_at_the_address_of_one_that_is_gone() -> None:
    """What cannot be looked into counts by identity: an address alone is not one, it is given away again."""

    def make(setting: Slotted, name: str) -> Member:
        return sgd(coded(lambda model, x: model.layer(x) * model.setting.value, setting=setting), name)

    setting = Slotted(1.0)
    address = id(setting)
    fleet = Fleet([make(setting, "first"), adam_member(1)], mse, EXAMPLE)
    del setting
    fleet.drop("first")
    gc.collect()
    settings = [Slotted(3.0) for _ in range(50_000)]  # every free place of that size is taken
    reused = next((item for item in settings if id(item) == address), settings[0])
    fleet.add(make(reused, "second"))
    losses = [fleet.step(batch)[1].item() for batch in BATCHES[:2]]
    expected = train_alone(make(Slotted(3.0), "alone"), BATCHES[:2])
    assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_members_that_differ_in_evaluation_only() -> None:
    """They train as one. Evaluated, each must be what it is."""

    def evaluated(model: Any, x: Tensor) -> Any:
        return model.layer(x) * (1.0 if model.training else model.factor)

    members = [adam(coded(evaluated, factor=1.0 + i), f"m{i}") for i in range(2)]
    fleet = Fleet(members, mse, EXAMPLE)
    fleet.step(EXAMPLE)
    got = fleet.evaluate([EXAMPLE])
    fleet.sync()
    for member in members:
        member.model.eval()
        expected = mse(member.model, EXAMPLE).item()
        assert got[member.name or ""]["loss"] == pytest.approx(expected, rel=TOLERANCE)


# ---- what cannot be fused ------------------------------------------------------------------------------


@pytest.fixture
def unfusable(built_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that no graph can be fused to more than one member."""
    original = build_module.fuse

    def fuse(traced: Any, width: int, *args: Any, **kwargs: Any) -> Any:
        if width > 1:
            raise FusionError("aten.odd.default cannot be fused: it is odd", op="aten.odd.default")
        return original(traced, width, *args, **kwargs)

    monkeypatch.setattr(build_module, "fuse", fuse)


@pytest.mark.usefixtures("unfusable")
def test_what_cannot_be_fused_trains_one_by_one() -> None:
    """Who knows of it only when a second member comes is told then, and once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet = Fleet([adam_member(0)], mse, EXAMPLE)
    fleet.step(BATCHES[0])
    with pytest.warns(TrainmuxWarning, match=r"aten\.odd\.default.*it is odd") as told:
        fleet.add(adam_member(1))
    assert len(told) == 1
    assert told[0].filename == __file__
    fleet.add(adam_member(2))
    fleet.replace("m1", adam_member(3))
    assert groups_of(fleet) == [("m0",), ("m3",), ("m2",)]
    assert all("it is odd" in group.unfused_because for group in fleet.summary())
    assert fleet.explain().count("trains at width 1: aten.odd.default cannot be fused: it is odd") == 3
    fleet.step(BATCHES[1])
    assert_alone(fleet, (adam_member(0), BATCHES[:2]), *((adam_member(i), BATCHES[1:2]) for i in (2, 3)))


def test_operators_without_a_batching_rule_are_looped_over_and_said() -> None:
    def normed(i: int) -> Member:
        return sgd(nn.Sequential(nn.utils.parametrizations.weight_norm(mlp(i)[0]), mlp(i)[2]), f"m{i}")

    fleet = Fleet([normed(i) for i in range(3)], mse, EXAMPLE)
    (summary,) = fleet.summary()
    looped = [record for record in summary.records if record.how == "loop"]
    assert looped
    assert all(record.fallback and record.op in fleet.explain() for record in looped)
    assert_trains_alone(fleet, normed, BATCHES[:3])


# ---- what a fleet tells about itself -------------------------------------------------------------------


def test_every_group_is_told_in_the_same_words_every_time() -> None:
    """In another fleet, and after training, evaluation and a sync."""
    fleet, other = (Fleet([bn_member(0), sgd_member(1), bn_member(2)], mse, EXAMPLE) for _ in range(2))
    for block, group in zip(fleet.explain().split("\n\n"), fleet.summary(), strict=True):
        assert f"slots taken ({', '.join(group.members)})" in block
        assert all(record.op in block for record in group.records)
    for batch in BATCHES[:2]:
        other.step(batch)
    other.evaluate([EXAMPLE])
    other.sync()
    assert other.explain() == fleet.explain()
    other.drop("m0")
    assert "1 of 2 slots taken (m2)" in other.explain()
