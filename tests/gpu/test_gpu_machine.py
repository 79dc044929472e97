"""What a machine with a GPU says of itself."""

from __future__ import annotations

import pytest
import torch

import trainmux as tm

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def facts() -> tm.MachineFacts:
    return tm.inspect_machine()


def test_the_device_is_described(facts: tm.MachineFacts) -> None:
    assert facts.device == "cuda:0"
    assert facts.cuda.error == ""
    assert len(facts.cuda.gpus) == torch.cuda.device_count()
    gpu = facts.cuda.gpus[0]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert gpu.free_bytes is not None
    assert 0 < gpu.free_bytes <= gpu.memory_bytes
    assert facts.cuda.built_for == torch.version.cuda
    assert facts.cuda.cudnn


def test_graphs_and_pools_work_here(facts: tm.MachineFacts) -> None:
    assert (facts.cuda.graphs_error, facts.cuda.pool_error) == ("", "")
    assert facts.cuda.allocator == torch.cuda.get_allocator_backend()


def test_bandwidths_are_in_order(facts: tm.MachineFacts) -> None:
    assert facts.rates is not None, facts.rates_error
    link = facts.rates.link
    assert 1e9 < link.out_duplex <= link.out < facts.rates.memory
    assert 1e9 < link.into_duplex <= link.into < facts.rates.memory


def test_it_is_quick_and_leaves_no_memory_behind(facts: tm.MachineFacts) -> None:
    """By now torch has a context, so what is left is the looking itself."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    again = tm.inspect_machine()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert again.seconds < 10
