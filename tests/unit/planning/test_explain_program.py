"""A program as text: every instruction on a line of its own, by names."""

from __future__ import annotations

import dataclasses
import difflib

import pytest
from small_step import BACKWARD, HEAD, LAYER, MAP, MASK, STEP, plain, schedule

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Recomputation, Swap
from trainmux.planning import explain_program, rewrite

SWAP = Swap(0, MASK, (0, LAYER), (0, HEAD), (0, BACKWARD))


def test_the_text_of_a_small_program() -> None:
    again = Recomputation(0, MAP, (LAYER,), (0, BACKWARD))
    program = plain([STEP], schedule(Multiplexing.TURNS, [SWAP], [again]))
    assert explain_program(program, [STEP]) == "\n".join(
        [
            "slab 7680 bytes, host copies 512 bytes",
            "on the device between steps: 2 tensors",
            "  0/0 batch 512 bytes",
            "  0/1 weight 1024 bytes",
            "prologue: 0 instructions",
            "body: 21 instructions",
            "  compute   0/0 layer takes 0/2 map 2048 bytes, 0/3 mask 512 bytes, workspace 100 bytes",
            "  wait      device to host, for compute 0/0 layer",
            "  offload   0/3 mask",
            "  wait      compute, for offload 0/3 mask",
            "  free      0/3 mask gives 512 bytes",
            "  compute   0/1 head takes 0/4 top 1024 bytes",
            "  free      0/2 map gives 2048 bytes",
            "  compute   0/2 loss takes 0/5 loss 4 bytes",
            "  compute   0/3 loss backward takes 0/6 slope 2048 bytes",
            "  free      0/4 top gives 1024 bytes",
            "  wait      host to device, for free 0/4 top",
            "  prefetch  0/3 mask takes 512 bytes",
            "  recompute 0/0 layer takes 0/2 map 2048 bytes, workspace 100 bytes",
            "  wait      compute, for prefetch 0/3 mask",
            "  compute   0/4 layer backward takes 0/7 gradient 1024 bytes",
            "  free      0/2 map gives 2048 bytes",
            "  free      0/3 mask gives 512 bytes",
            "  free      0/6 slope gives 2048 bytes",
            "  compute   0/5 update",
            "  free      0/7 gradient gives 1024 bytes",
            "  free      0/5 loss gives 4 bytes",
            "epilogue: 0 instructions",
            "",
        ]
    )


def test_one_decision_more_changes_only_the_lines_it_is_about() -> None:
    texts = [
        explain_program(rewrite([STEP], schedule(Multiplexing.RING, swaps)), [STEP]).splitlines()
        for swaps in ((), (SWAP,))
    ]
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    about = ("mask", "instructions", "slab", "+   wait")
    assert sum("offload   0/3 mask" in line for line in changed) == 2
    assert [line for line in changed if not any(word in line for word in about)] == []


def test_a_program_of_other_profiles_is_refused() -> None:
    program = rewrite([STEP], schedule(Multiplexing.TURNS))
    for profiles in ([], [dataclasses.replace(STEP, nodes=STEP.nodes[:2])]):
        with pytest.raises(PlanError, match="pass those that it was made for"):
            explain_program(program, profiles)
