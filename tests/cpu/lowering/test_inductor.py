"""Private API of Inductor that lowering relies on; a new torch that breaks it breaks here first."""

from __future__ import annotations

import shutil
import sys
import warnings

import pytest
import torch
from lowering_tools import traced
from torch import Tensor
from torch._inductor import config

from trainmux.lowering import KernelCache, lower
from trainmux.lowering._inductor import _configuration, compiler_missing, decompositions, is_fusable, settings
from trainmux.runtime import random_words

aten, prims = torch.ops.aten, torch.ops.prims
CPU = torch.device("cpu")


TAKEN_APART = [
    aten.native_layer_norm.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten.gelu_backward.default,
    aten.native_batch_norm_backward.default,
    aten.embedding_dense_backward.default,
    aten.threshold_backward.default,
    aten.baddbmm.default,
]
FUSABLE = [
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.mul_.Tensor,
    aten.addcmul_.default,
    aten.copy_.default,
    aten.logical_and_.default,
    aten.where.self,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.relu.default,
    aten.index.Tensor,
    aten.full.default,
    aten.arange.default,
    aten.var_mean.correction,
    aten.add.out,
    prims.convert_element_type.default,
    torch.ops.trainmux.random_words.default,
]
NOT_FUSABLE = [
    aten.mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten.mm.out,
    aten._fft_r2c.default,
    torch.add,
    "aten::add",
]


def test_operators_that_are_taken_apart_fused_and_left_to_libraries() -> None:
    assert [op for op in TAKEN_APART if op not in decompositions()] == []
    assert [op for op in FUSABLE if not is_fusable(op)] == []
    assert [op for op in NOT_FUSABLE if is_fusable(op)] == []


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (0.5, 1), (1, 2.0), (0.5, -1.5)])
def test_a_product_and_sum_of_batches(beta: float, alpha: float) -> None:
    offset, a, b = (torch.randn(shape, dtype=torch.float64) for shape in [(3, 2, 5), (3, 2, 4), (3, 4, 5)])
    got = decompositions()[aten.baddbmm.default](offset, a, b, beta=beta, alpha=alpha)
    torch.testing.assert_close(got, torch.baddbmm(offset, a, b, beta=beta, alpha=alpha))


@pytest.mark.parametrize(("deterministic", "combines"), [(True, False), (False, True)])
def test_settings_hold_inside_and_are_gone_outside(deterministic: bool, combines: bool) -> None:
    expected = {"fx_graph_cache": True, "comprehensive_padding": False, "combo_kernels": combines}
    if deterministic and hasattr(config, "deterministic"):
        expected["deterministic"] = True
    before = {name: getattr(config, name) for name in expected}
    with settings(deterministic=deterministic, combines=combines):
        assert {name: getattr(config, name) for name in expected} == expected
    with pytest.raises(KeyError), settings(deterministic=deterministic, combines=combines):
        raise KeyError
    assert {name: getattr(config, name) for name in expected} == before


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    assert compiler_missing(CPU) == ""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "C++ compiler" in compiler_missing(CPU)
    if not torch.cuda.is_available():
        assert "Triton" in compiler_missing(torch.device("cuda", 0))


@pytest.mark.skipif(bool(compiler_missing(CPU)), reason="there is no C++ compiler")
@pytest.mark.slow
def test_a_compiled_region_changes_its_inputs_and_draws_the_same_words() -> None:
    """In-place updates, placed results and random words, from one kernel."""

    def function(held: Tensor, x: Tensor, seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
        words = random_words(seed, counter, 5, [3, 40])
        held.add_(x * 2)
        return words, held.sum(1)

    seeds = torch.tensor([3, -(2**62)]), torch.tensor([0, 2**40])
    held, x = torch.randn(6, 20), torch.randn(6, 20)
    cache = KernelCache()
    lowered = lower(traced(function, held, x, *seeds), cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what torch says about itself must not keep it from compiling
        cache.compile(lowered.kernels)
    assert all(kernel.is_compiled for kernel in lowered.kernels), [k.failure for k in lowered.kernels]
    expected_held = held + x * 2
    words, total = lowered.module(held, x, *seeds)
    assert torch.equal(words, random_words(*seeds, 5, [3, 40]))
    torch.testing.assert_close(held, expected_held)
    torch.testing.assert_close(total, expected_held.sum(1))


def test_the_configuration_is_that_of_inductors_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({}, {"max_autotune": True}):
        with config.patch(changes):
            expected = config.save_config_portable(ignore_private_configs=False)
            assert _configuration() == expected
            with monkeypatch.context() as patches:
                patches.delitem(sys.modules, "torch._inductor.choices", raising=False)
                assert _configuration() == expected
