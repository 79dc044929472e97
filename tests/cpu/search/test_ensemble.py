"""`tm.ensemble` and `tm.seeds`: all members in one call, each as it computes by itself."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.workloads.seeding import seeded
from fleet_cases import Made, mse
from torch import Tensor, nn

import trainmux as tm

FLOAT = torch.float64
INPUTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
TARGETS = INPUTS.sum(1, keepdim=True)


def net(dropout: float = 0.5) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2)
    ).to(FLOAT)


def make() -> tm.Member:
    model = net()
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))


def alone(models: list[nn.Module], *args: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack([copy.deepcopy(model).eval()(*args) for model in models])


def close(one: Tensor, other: Tensor) -> bool:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    return True


def made(code: Callable[[Any, Tensor], Any], **attributes: Any) -> nn.Module:
    """A linear layer around which a function computes."""
    return Made(code, layer=nn.Linear(3, 2, dtype=FLOAT), **attributes)


# ---- seeds -------------------------------------------------------------------------------------------------


def test_seeds_differ_in_weights_and_draws_only() -> None:
    before = torch.get_rng_state()
    members = tm.seeds(make, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert [(member.name, member.seed) for member in members] == [(f"seed={i}", i) for i in range(3)]
    again = tm.seeds(make, np.array([2, 5]))
    assert torch.equal(again[0].model[0].weight, members[2].model[0].weight)
    assert not torch.equal(again[1].model[0].weight, members[2].model[0].weight)
    assert tm.Fleet(members, mse, (INPUTS, TARGETS)).groups == (("seed=0", "seed=1", "seed=2"),)


@pytest.mark.parametrize("which", [0, [], [1, 1], [0.5], [True]])
def test_seeds_are_different_whole_numbers(which: Any) -> None:
    with pytest.raises(tm.ConfigError, match="which: expected a"):
        tm.seeds(make, which)


def test_what_makes_seeds_returns_members() -> None:
    with pytest.raises(
        tm.MemberError, match=r"expected make\(\) to return a trainmux.Member, got Sequential"
    ):
        tm.seeds(net, 2)  # type: ignore[arg-type]


# ---- ensembles ---------------------------------------------------------------------------------------------


def test_an_ensemble_of_a_fleet_has_its_members_and_outlives_it() -> None:
    fleet = tm.Fleet(tm.seeds(make, 3), mse, (INPUTS, TARGETS))
    for _ in range(3):
        fleet.step((INPUTS, TARGETS))
    model = tm.ensemble(fleet)
    expected = alone([member.model for member in fleet.members], INPUTS)
    fleet.step((INPUTS, TARGETS))
    fleet.sync()
    del fleet
    assert close(model.outputs(INPUTS), expected)
    assert close(model(INPUTS), expected.mean(0))
    mean, variance = model.mean_and_variance(INPUTS)
    assert close(mean, expected.mean(0))
    assert close(variance, expected.var(0, correction=0))
    assert (len(model), model.names) == (3, ("seed=0", "seed=1", "seed=2"))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.train()
    assert close(model(INPUTS), expected.mean(0))  # in evaluation mode all the same


def test_members_come_out_one_by_one_with_their_own_settings() -> None:
    models = [seeded(net, dropout=p)(i).eval() for i, p in enumerate([0.1, 0.1, 0.7])]
    model = tm.ensemble(models)
    assert len(model.stacks) == 1  # dropout does nothing here
    for number, (one, other) in enumerate(zip(models, model.members, strict=True)):
        assert one.state_dict().keys() == other.state_dict().keys()
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
        assert other[3].p == models[number][3].p
        assert all(parameter.requires_grad for parameter in other.parameters())
    nn.init.zeros_(model.members[0][0].weight)
    assert close(model.outputs(INPUTS), alone(models, INPUTS))


def test_an_ensemble_is_saved_copied_and_moved_like_any_module() -> None:
    models = [seeded(net)(i).eval() for i in range(2)]
    model, other = tm.ensemble(models), tm.ensemble([seeded(net)(i).eval() for i in range(5, 7)])
    expected = model(INPUTS)
    other.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (other, copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(one(INPUTS), expected)
    half = copy.deepcopy(model).to(torch.float32)
    torch.testing.assert_close(half(INPUTS.float()), expected.float(), rtol=1e-4, atol=1e-5)
    assert half.members[1][0].weight.dtype == torch.float32


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Any]


def test_outputs_of_any_structure() -> None:
    def code(self: Any, x: Tensor) -> Pair:
        return Pair(self.layer(x), {"hidden": [x * 2], "label": "text", "none": None})

    model = tm.ensemble([made(code), made(code)])
    found = model(INPUTS)
    assert isinstance(found, Pair)
    assert found.first.shape == (6, 2)
    assert found.rest["label"] == "text"
    assert found.rest["none"] is None
    assert close(found.rest["hidden"][0], INPUTS * 2)
    chosen = tm.ensemble([made(code), made(code)], output=lambda found: found.first.softmax(-1))
    assert close(chosen(INPUTS).sum(-1), torch.ones(6, dtype=FLOAT))


def test_different_models_are_averaged_too() -> None:
    """In the order given; those that are alike go together, and a number of their code makes them differ."""
    slope = [made(lambda self, x: self.layer(x) * self.slope, slope=value) for value in (1.0, 2.0)]
    wide = [nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).to(FLOAT) for _ in range(2)]
    models = [wide[0], slope[0], wide[1], slope[1]]
    model = tm.ensemble(models)
    assert len(model.stacks) == 3
    assert close(model.outputs(INPUTS), alone(models, INPUTS))
    assert [type(one) for one in model.members] == [type(one) for one in models]


def test_memory_that_members_share_is_held_once() -> None:
    base = nn.Linear(3, 3, dtype=FLOAT)
    models = [nn.Sequential(tm.share_frozen(base), nn.Linear(3, 2, dtype=FLOAT)) for _ in range(4)]
    model = tm.ensemble(models)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held == 12 + 4 * 8
    assert close(model.outputs(INPUTS), alone(models, INPUTS))


def test_tied_weights_stay_tied() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, dtype=FLOAT), nn.Tanh(), nn.Linear(3, 3, dtype=FLOAT))
        model[2].weight = model[0].weight
        return model

    models = [tied() for _ in range(2)]
    model = tm.ensemble(models)
    assert close(model.outputs(INPUTS), alone(models, INPUTS))
    first, _ = model.members
    assert first[2].weight is first[0].weight


def test_what_vmap_refuses_is_computed_one_by_one() -> None:
    def branching(self: Any, x: Tensor) -> Tensor:
        found = self.layer(x)
        return -found if found.sum().item() > 0 else found

    models = [made(branching) for _ in range(3)]
    model = tm.ensemble(models)
    with pytest.warns(tm.TrainmuxWarning, match="Made: members of the ensemble are computed one after"):
        found = model.outputs(INPUTS)
    assert close(found, alone(models, INPUTS))
    assert close(model.outputs(INPUTS), found)  # and no second warning
    assert "one by one" in repr(model)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:enable_nested_tensor is True")
def test_layers_with_shortcuts_of_their_own() -> None:
    def transformer() -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=FLOAT)
        return nn.TransformerEncoder(layer, 1)

    models = [seeded(transformer)(i).eval() for i in range(2)]
    tokens = torch.randn(2, 3, 4, dtype=FLOAT)
    model = tm.ensemble(models)
    assert close(model.outputs(tokens), alone(models, tokens))
    assert "one by one" not in repr(model)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_wrong_input_is_told_as_a_model_tells_it() -> None:
    model = tm.ensemble([seeded(net)(i).eval() for i in range(2)])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(INPUTS[:, :2])
    assert model(INPUTS).shape == (6, 2)
    assert "one by one" not in repr(model)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tm.ensemble([]), tm.MemberError, "at least one member for an ensemble, got none"),
        (lambda: tm.ensemble(["a"]), tm.MemberError, "trials or folds, got str"),
        (
            lambda: tm.ensemble([made(lambda self, x: self.layer(x).argmax(-1))])(INPUTS),
            tm.ConfigError,
            "output: expected numbers with a mean, got torch.int64",
        ),
        (
            lambda: tm.ensemble([made(lambda self, x: "text")])(INPUTS),
            tm.ConfigError,
            "expected a member to return tensors, got str",
        ),
        (
            lambda: tm.ensemble([nn.Linear(3, 2, dtype=FLOAT), nn.Linear(3, 4, dtype=FLOAT)])(INPUTS),
            tm.ConfigError,
            "outputs of one structure and shape, got .*2.*member-0.* and .*4.*member-1",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
