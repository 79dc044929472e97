"""From a pair that fits to a schedule: take back what is not needed, settle releases, write it down.

Not in the paper. A greedy choice can be made needless by those after it; and while choices are made a swapped
tensor counts as gone from the first node on that demands its bytes, when its copy to the host may still run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainmux.ir import Recomputation, Schedule, Swap
from trainmux.planning._recompute import Decision
from trainmux.planning.policies._mutwo_body import BODY_END, Ints
from trainmux.planning.policies._mutwo_copies import Key
from trainmux.planning.policies._mutwo_pair import Pair


def take_back(pair: Pair) -> list[Key]:
    """Keep every tensor after all that there is memory for; returns them.

    Those that cost the most time come first: recomputations, then swaps that stall, then other swaps, the
    largest first. None is kept that would need time of another, for a copy that it hides.
    """
    kept = []
    recomputed = [(-record.seconds, key) for key, record in pair.recomputed.items()]
    swapped = [
        (-copy.stall_seconds, -copy.size_bytes, copy.key) for lane in pair.lanes_in for copy in lane.copies
    ]
    needed = pair.body.needed()
    for key in [key for *_, key in sorted(recomputed)] + [key for *_, key in sorted(swapped)]:
        if _lowest_room(pair, key, needed) < pair.size(key):
            continue
        state = pair.state()
        pair.keep(key)
        after = pair.body.needed()
        lane = pair.lanes_in[int(pair.body.stage_of[pair.first_bw_access(key)])]
        if lane.is_hidden.all() and not len(pair.over(after)):
            kept.append(key)
            needed = after
        else:
            pair.go_back(state)
    for sub_array, lineage in enumerate(pair.lineages):
        lineage.keep([tensor for owner, tensor in kept if owner == sub_array])
    pair.lane_out.remove(kept)
    return kept


def emit(pair: Pair, reasons: Mapping[Key, str]) -> Schedule:
    """The pair's order and decisions as a schedule, each with its reason."""
    nodes, order, place = pair.body.nodes, pair.body.order, pair.body.place
    releases = _settle_releases(pair)
    swaps = []
    for lane in pair.lanes_in:
        for copy, prompt in zip(lane.copies, lane.prompts, strict=True):
            release = int(order[0]) if releases[copy.key] == BODY_END else releases[copy.key]
            swaps.append(
                Swap(
                    *copy.key,
                    offload_after=nodes[pair.last_fw_access(copy.key)],
                    release_before=nodes[release],
                    prefetch_prompt=nodes[int(prompt)],
                    reason=reasons[copy.key],
                )
            )
    recomputes = []
    for sub_array, lineage in enumerate(pair.lineages):
        for tensor, decision in lineage.decisions.items():
            if decision is Decision.RECOMPUTE:
                key = (sub_array, tensor)
                before = nodes[pair.first_bw_access(key)]
                recomputes.append(Recomputation(*key, lineage.recomp_graph(tensor), before, reasons[key]))
    recomputes.sort(key=lambda record: (int(place[pair.body.number(*record.before)]), record.nodes[-1]))
    return Schedule(
        pair.task.multiplexing,
        tuple(nodes[int(number)] for number in order),
        tuple(swaps),
        tuple(recomputes),
    )


def _lowest_room(pair: Pair, key: Key, needed: Ints) -> int:
    """The least memory left where a recomputed or swapped tensor is not there."""
    place = pair.body.place
    begin = int(place[pair.last_fw_access(key)]) + 1
    end = int(place[pair.first_bw_access(key)])
    if key not in pair.recomputed:
        lane = pair.lanes_in[int(pair.body.stage_of[pair.first_bw_access(key)])]
        index = next(index for index, copy in enumerate(lane.copies) if copy.key == key)
        release = lane.copies[index].release
        begin = len(needed) if release == BODY_END else int(place[release])
        end = int(place[lane.prompts[index]])
    if begin <= end:
        highest = needed[begin:end].max(initial=0)
    else:
        highest = max(needed[begin:].max(initial=0), needed[:end].max(initial=0))
    return pair.limit - int(highest)


def _settle_releases(pair: Pair) -> dict[Key, int]:
    """For each swap the node before which its bytes are given back, or `BODY_END`.

    When its copy to the host has ended by then, as far as memory allows.
    """
    body = pair.body
    copies = {
        copy.key: (copy, int(body.place[prompt]))
        for lane in pair.lanes_in
        for copy, prompt in zip(lane.copies, lane.prompts, strict=True)
    }
    releases: dict[Key, int] = {}
    if not copies:
        return releases
    needed, times, count = body.needed(), body.start_times(), len(body.order)
    order, ends = pair.lane_out.ends(body, times)
    for index, end in zip(order, ends, strict=True):
        key = pair.lane_out.keys[int(index)]
        copy, prompt = copies[key]
        offload = int(body.place[pair.last_fw_access(key)])
        stop = count if prompt <= offload else prompt - 1
        ended = int(np.searchsorted(times[:-1], end - pair.tolerance))
        natural = min(max(ended, offload + 1), stop)
        current = count if copy.release == BODY_END else int(body.place[copy.release])
        if natural <= current:
            needed[natural:current] -= copy.size_bytes
            release = natural
        else:
            over = pair.over(needed[current:natural] + copy.size_bytes)
            release = current + int(over[0]) if len(over) else natural
            needed[current:release] += copy.size_bytes
        releases[key] = BODY_END if release == count else int(body.order[release])
    return releases
