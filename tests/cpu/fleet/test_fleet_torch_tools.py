"""Tools of torch that read values or compile: fused members train as with them in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_cases import EXAMPLE, TOLERANCE, mlp, mse, train_alone, vectors
from torch import Tensor, distributions, nn

import trainmux as tm

Loss = Callable[[nn.Module, Any], Tensor]


def assert_trains_like_torch(
    loss: Loss, batches: list[Any], plain_loss: Loss | None = None, compiles: bool = False
) -> tm.Fleet:
    """A step for each batch, of a fleet and of plain torch on equal models."""
    models, plain = [mlp(0), mlp(1)], [mlp(0), mlp(1)]
    given: list[Any] = [torch.compile(model, backend="eager") for model in models] if compiles else models
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in given]
    fleet = tm.Fleet(members, loss, batches[0])
    losses = [fleet.step(batch) for batch in batches]
    fleet.sync()
    for position, (model, other) in enumerate(zip(models, plain, strict=True)):
        alone = tm.Member(other, torch.optim.SGD(other.parameters(), lr=0.1))
        expected = train_alone(alone, batches, plain_loss or loss)
        assert [step[position].item() for step in losses] == pytest.approx(expected, rel=TOLERANCE)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    return fleet


def normal(model: nn.Module, batch: Any) -> Tensor:
    mean = model(batch[0])
    fitted = -distributions.Normal(mean, 1.3, validate_args=True).log_prob(batch[1]).mean()
    return fitted + distributions.kl_divergence(distributions.Normal(mean, mean.exp()), PRIOR).mean()


PRIOR = distributions.Normal(0.0, 1.0)


def categorical(model: nn.Module, batch: Any) -> Tensor:
    found = distributions.Categorical(logits=model(batch[0]))
    return -found.log_prob((batch[1][:, 0] > 0).long()).mean() - found.entropy().mean()


@pytest.mark.parametrize("loss", [normal, categorical])
def test_distributions_check_their_arguments_but_not_while_tracing(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first torch.compile of a process switches these checks off for all of it.
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    assert_trains_like_torch(loss, [EXAMPLE, EXAMPLE])
    with pytest.raises(ValueError, match="scale"):
        distributions.Normal(0.0, -1.0)


def test_a_compiled_function_in_a_loss_is_traced_as_it_was_written() -> None:
    compiled = torch.compile(F.mse_loss, backend="eager")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return compiled(model(batch[0]), batch[1])  # type: ignore[no-any-return]

    assert_trains_like_torch(loss, [EXAMPLE, EXAMPLE], plain_loss=mse)


def test_compiled_models_train_as_what_they_were_made_of() -> None:
    assert len(assert_trains_like_torch(mse, [EXAMPLE, EXAMPLE], compiles=True).summary()) == 1


# ---- what else a batch may hold ------------------------------------------------------------------------


def named_batch(seed: int, **others: Any) -> dict[str, Any]:
    x, y = vectors(seed)
    return {"x": x, "y": y, **others}


def by_name(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def test_keys_come_in_any_order() -> None:
    batches = [named_batch(0), dict(reversed(named_batch(1).items())), named_batch(2)]
    assert_trains_like_torch(by_name, batches)


def test_code_that_goes_by_the_order_of_keys_sees_the_order_of_each_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = batch.values()
        return model(first).square().mean() + (model(second) * 3).mean()

    def batch(seed: int, *keys: str) -> dict[str, Tensor]:
        return {key: vectors(seed + ord(key))[0] for key in keys}

    assert_trains_like_torch(loss, [batch(0, "a", "b"), batch(1, "b", "a"), batch(2, "a", "b")])


def test_text_that_nobody_reads_may_differ() -> None:
    batches = [
        named_batch(0, file="one", files=["a", "b"]),
        named_batch(1, file="two", files=["c", "d"]),
        named_batch(2, file="", files=["e"]),
    ]
    assert_trains_like_torch(by_name, batches)


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

    fleet = assert_trains_like_torch(loss, [named_batch(seed, mode="double") for seed in range(2)])
    with pytest.raises(tm.BatchError):
        fleet.step(named_batch(1, mode="single"))


def test_text_that_only_a_metric_reads() -> None:
    def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {batch["mode"]: by_name(model, batch)}

    model = mlp(0)
    batch = named_batch(0, mode="error")
    fleet = tm.Fleet([tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "a")], by_name, batch)
    fleet.step(named_batch(0, mode="other"))
    fleet.sync()
    expected = by_name(model, batch).item()
    for _ in range(2):
        assert fleet.evaluate([batch], metric)["a"]["error"] == pytest.approx(expected, rel=TOLERANCE)
    assert torch.isfinite(fleet.step(batch)).all()


# ---- operators whose results depend on values -----------------------------------------------------------


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([4]), batch_first=True)
        return self.cells(packed)[0].data  # type: ignore[no-any-return]


def ctc(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])[:, None].log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(1, 2, dtype=torch.int64), torch.tensor([5]), torch.tensor([2]))


@pytest.mark.parametrize(
    ("model", "loss", "parts"),
    [
        (Packed().double(), lambda m, b: m(b[0]).mean(), ("_pack_padded_sequence", "mask")),
        (mlp(), ctc, ("_ctc_loss", "logsumexp")),
    ],
    ids=["packed", "ctc"],
)
def test_refused_with_a_remedy_of_its_own(model: nn.Module, loss: Loss, parts: tuple[str, str]) -> None:
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tm.TraceError, match=f"{parts[0]}.*{parts[1]}"):
        tm.Fleet([member], loss, EXAMPLE)
