"""What a machine with a GPU says of itself."""

from __future__ import annotations

import pytest
import torch
from settled import settle

import trainmux as tm

pytestmark = pytest.mark.alone


def test_the_machine_is_described_quickly_and_nothing_is_left_behind() -> None:
    settle()  # torch has a context from here on
    before = torch.cuda.memory_reserved()
    facts = tm.inspect_machine()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert facts.seconds < 10
    assert facts.device == "cuda:0"
    assert (facts.cuda.error, facts.cuda.graphs_error, facts.cuda.pool_error) == ("", "", "")
    assert len(facts.cuda.gpus) == torch.cuda.device_count()
    gpu = facts.cuda.gpus[0]
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert gpu.free_bytes is not None
    assert 0 < gpu.free_bytes <= gpu.memory_bytes
    assert facts.cuda.built_for == torch.version.cuda
    assert facts.cuda.cudnn
    assert facts.cuda.allocator == torch.cuda.get_allocator_backend()
    assert facts.rates is not None, facts.rates_error
    link = facts.rates.link
    assert 1e9 < link.out_duplex <= link.out < facts.rates.memory
    assert 1e9 < link.into_duplex <= link.into < facts.rates.memory
