"""Pages to look at: of an ordinary plan, of a large one, and of one whose every name tries to break out."""

from __future__ import annotations

from dataclasses import replace

from sample_plans import Sample, ring_sample

from trainmux.ir import SubArray
from trainmux.reporting import plan_page

EVIL = "</script><script>window.evil = true</script><img src=x onerror=alert(1)> & \" ' <!--"


def page_of(sample: Sample, *, measured: bool = True, title: str = "A plan") -> str:
    return plan_page(
        sample.plan,
        sample.program,
        sample.profiles,
        sample.predicted,
        measured=sample.measured if measured else None,
        prologue=sample.prologue,
        epilogue=sample.epilogue,
        budget_curve=sample.budget_curve,
        title=title,
    )


def large_sample() -> Sample:
    """Ten thousand instructions."""
    return ring_sample(num_layers=330, layer_name="model.encoder.transformer.layers")


def evil_sample() -> Sample:
    sample = ring_sample(num_layers=3, layer_name=EVIL)
    plan = sample.plan
    swaps = tuple(replace(swap, reason=EVIL) for swap in plan.swaps)
    recomputes = tuple(replace(again, reason=EVIL) for again in plan.recomputes)
    return replace(
        sample,
        plan=replace(
            plan,
            policy=EVIL,
            partition=tuple(SubArray((EVIL,) * 2, one.profile) for one in plan.partition),
            attempts=tuple(replace(one, policy=EVIL, lost_because=EVIL) for one in plan.attempts),
            schedule=replace(plan.schedule, swaps=swaps, recomputes=recomputes),
        ),
    )
