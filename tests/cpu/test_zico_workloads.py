"""NASNet-A and the recurrent highway network: their published sizes, and what a step of them computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from benchmarks.workloads.deep_vision import RESNET_50, ResNet
from benchmarks.workloads.highway import PENN_VOCAB_SIZE, HighwayLanguageModel, highway_batch
from benchmarks.workloads.nasnet import NASNetA
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("make", "num_parameters"),
    [
        (NASNetA, 5_289_978),  # Zoph et al., Table 2: 5.3 million
        (HighwayLanguageModel, 23_482_400),  # Zilly et al., Table 1: 23 million with tied weights
        (partial(HighwayLanguageModel, tied=False), 31_782_400),  # and 32 million without
        (partial(ResNet, num_blocks=RESNET_50), 25_557_032),
    ],
)
def test_models_have_the_published_numbers_of_parameters(
    make: Callable[[], nn.Module], num_parameters: int
) -> None:
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize(("num_stages", "penultimate"), [(1, 24), (3, 96)])
def test_a_small_nasnet_gives_logits_and_gradients_everywhere(num_stages: int, penultimate: int) -> None:
    model = NASNetA(1, penultimate, stem_channels=8, num_classes=4, num_stages=num_stages)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 4)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_highway_network_follows_its_equations() -> None:
    torch.manual_seed(0)
    size, depth = 5, 3
    model = HighwayLanguageModel(vocab_size=11, hidden_size=size, depth=depth).double()
    tokens, _ = highway_batch(0, 2, length=4, vocab_size=11)

    def halves(weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight[:size], weight[size:]

    w_h, w_t = halves(model.enter.weight)
    rows = []
    for row in tokens:
        state = torch.zeros(size, dtype=torch.float64)
        for token in row:
            x = model.embedding.weight[token]
            for number, layer in enumerate(model.layers):
                assert isinstance(layer, nn.Linear)
                (r_h, r_t), (b_h, b_t) = halves(layer.weight), halves(layer.bias)
                enters = number == 0
                h = torch.tanh(w_h @ x * enters + r_h @ state + b_h)
                t = torch.sigmoid(w_t @ x * enters + r_t @ state + b_t)
                state = h * t + state * (1 - t)
            rows.append(model.projection.weight @ state + model.projection.bias)
    torch.testing.assert_close(model(tokens), torch.stack(rows).view(2, 4, 11))


def test_words_are_followed_by_the_next_ones() -> None:
    tokens, targets = highway_batch(3, 4, length=6)
    assert tokens.shape == targets.shape == (4, 6)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert 0 <= tokens.min() <= tokens.max() < PENN_VOCAB_SIZE
    assert torch.equal(tokens, highway_batch(3, 4, length=6)[0])
    assert not torch.equal(tokens, highway_batch(4, 4, length=6)[0])
