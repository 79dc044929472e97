"""Plans made apart from the device: a machine with many cores or none of the device's time makes them.

`write_question` writes what planning needs to know of a fleet, its measured profiles above all, to a folder;
`answer` plans there, several plans at a time; `read_answer` has a plan, or why there is none.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import trainmux as tm
from trainmux.fleet._planning import FleetPlanner, PlanRequest
from trainmux.ir import Profile, load, save
from trainmux.profiling import known_branches, side_by_side
from trainmux.scheduling import Group, Planner, find_partitions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "scheduling"))

Wanted = tuple[str, int, str]
"""What a budget is called, its bytes, and a policy."""

_QUESTION = "question.json"


def write_question(fleet: tm.Fleet, num_partitions: int, folder: Path) -> None:
    """Measure the profiles of all widths and write them down with what is reserved beside the slab."""
    planner: FleetPlanner = fleet._planner(fleet._plans.whole(fleet._groups))
    whole = planner.plan(PlanRequest(None, "none", None, None, 0, num_partitions, None))
    groups = planner._planned_groups(None)
    search = find_partitions([len(group.members) for group in groups], max_partitions=num_partitions)
    for index in range(len(groups)):  # a plan that was kept has measured nothing
        for width in sorted({width for partition in search.partitions for width in partition.widths[index]}):
            for numbers in _numbers_beside(planner.profile(index, width)):
                planner.branched(index, *numbers)
    folder.mkdir(parents=True, exist_ok=True)
    for profile in planner._profiles.values():
        save(folder / f"{profile.fingerprint}.profile.json", profile)
    question = {
        "groups": [[group.name, list(group.members)] for group in groups],
        "profiles": [[*key, profile.fingerprint] for key, profile in planner._profiles.items()],
        "beside_bytes": planner._scratch,
        "fixed_bytes": planner._fixed_bytes(),
        "host_bytes": planner._facts.host_bytes,
        "memory_bytes": planner._facts.memory_bytes,
        "num_partitions": num_partitions,
        "static_bytes": static_bytes(whole),
        "peak_bytes": whole.peak_bytes,
    }
    (folder / _QUESTION).write_text(json.dumps(question, indent=1) + "\n")


def read_question(folder: Path) -> dict[str, Any]:
    """What `write_question` wrote, but for the profiles."""
    question: dict[str, Any] = json.loads((folder / _QUESTION).read_text())
    return question


def answer(folder: Path, wanted: Sequence[Wanted], num_processes: int) -> Iterator[str]:
    """Make the plans, those first that take the longest; a line about each as it is done."""
    rows = sorted(wanted, key=lambda row: (row[2] != "auto", row[1]))
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(_make, [(folder, row) for row in rows])


def read_answer(folder: Path, share: str, policy: str) -> tuple[tm.Plan | None, dict[str, Any]]:
    """A plan, and how long it took or why there is none."""
    path = _place(folder, share, policy)
    if not path.with_suffix(".said.json").exists():
        return None, {"error": f"expected a plan in {folder.name}, got none; make it with --answer"}
    said = json.loads(path.with_suffix(".said.json").read_text())
    return (None if "error" in said else tm.Plan.load(path)), said


def fluid_bound_ms(plan: tm.Plan) -> float:
    """What no decisions for the plan's order take less than, by linear programming (scipy)."""
    from fluid import fluid_seconds

    schedule = plan.record.schedule
    limit = plan.budget_bytes - plan.record.fixed_bytes
    return 1e3 * fluid_seconds(plan._profile_of_each(), schedule.multiplexing, schedule.order, limit)


def static_bytes(plan: tm.Plan) -> int:
    """What the plan's members hold between steps."""
    return sum(
        tensor.size_bytes
        for sub_array in plan.partition
        for tensor in plan.profiles[sub_array.profile].tensors
        if tensor.byte_class.is_static
    )


def _numbers_beside(profile: Profile) -> list[tuple[int, int]]:
    """Of how many members on how many branches it is known what they take."""
    known = known_branches(profile)
    return [(members, branches) for branches in known for members in (1, *known) if members <= branches]


def _make(given: tuple[Path, Wanted]) -> str:
    torch.set_num_threads(1)
    folder, (share, budget, policy) = given
    question = read_question(folder)
    profiles: dict[tuple[str, int], Profile] = {}
    for index, width, fingerprint in question["profiles"]:
        profiles[str(index), width] = load(folder / f"{fingerprint}.profile.json", Profile)
    branched: dict[tuple[str, int, int], Profile] = {
        (name, *numbers): side_by_side(profile, numbers[1], numbers[0])
        for (name, width), profile in profiles.items()
        for numbers in _numbers_beside(profile)
        if width == 1
    }
    begin = time.perf_counter()
    said: dict[str, Any] = {}
    try:
        planner = Planner(
            [Group(name, tuple(members)) for name, members in question["groups"]],
            profile_of=lambda group, width: profiles[group.name, width],
            branched_of=lambda group, *numbers: branched.get((group.name, *numbers)),
            policy=policy,
            fixed_bytes=question["fixed_bytes"],
            beside_of=lambda profile: int(question["beside_bytes"].get(profile.fingerprint, 0)),
            host_bytes=question["host_bytes"],
            max_partitions=question["num_partitions"],
        )
        record = planner.plan(budget)
        said["planning_s"] = time.perf_counter() - begin
        by_name = {profile.fingerprint: profile for profile in (*profiles.values(), *branched.values())}
        plan = tm.Plan(record, [by_name[name] for name in record.profiles])
        plan.save(_place(folder, share, policy))
    except Exception as error:  # the others go on
        said = {"error": str(error), "planning_s": time.perf_counter() - begin}
    else:
        try:
            said["fluid_bound_ms"] = fluid_bound_ms(plan)
        except Exception as error:  # a plan is one without this bound too
            said["fluid_bound_error"] = str(error)
    _place(folder, share, policy).with_suffix(".said.json").write_text(json.dumps(said))
    return f"{share} {policy}: {said.get('error', 'planned')}, {said['planning_s']:.0f} s"


def _place(folder: Path, share: str, policy: str) -> Path:
    return folder / f"{share.replace('/', '_of_')}.{policy}.json"
