"""Tables of pages, from what was measured: benchmarks/results.

Named in mkdocs.yml under ``hooks``; MkDocs calls the functions ``on_...``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
MODELS = {
    "mlp": "MLP 784-256-256-10",
    "small_cnn": "small CNN",
    "dlrm": "DLRM",
    "vit_b16": "ViT-B/16",
    "bert_base_mlm_no_dropout": "BERT-base",
    "mobilenet_v3_large": "MobileNetV3-Large",
    "gpt2_no_dropout": "GPT-2 124M",
    "resnet101": "ResNet-101",
}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put tables in the places of their names."""
    return markdown.replace("<!-- gains by model -->", gains_by_model())


def gains_by_model() -> str:
    """By the time that one step of one model takes alone: that of a member, and how many times faster."""
    rows = json.loads((RESULTS / "step_h200.json").read_text(encoding="utf-8"))["rows"]
    times = {
        (row["workload"], row["batch_size"], row["width"], row["way"]): row["median_ms"]
        for row in rows
        if row.get("median_ms") is not None
    }
    fleets = [key[:3] for key in times if key[2] > 1 and key[3] == "trainmux"]

    def line(fleet: tuple[str, int, int]) -> str:
        workload, batch_size, width = fleet
        member, alone, eager = (times[(*fleet, way)] for way in ("trainmux", "compiled_graph", "eager"))
        what = f"{width} × {MODELS[workload]}, batch {batch_size} | {alone:#.3g} | {member:#.3g}"
        return f"| {what} | **{alone / member:.1f}×** | {eager / member:.3g}× |"

    head = "| | one model alone, ms | in a fleet, ms | faster | than eager torch |\n|---|---:|---:|---:|---:|"
    ordered = sorted(fleets, key=lambda fleet: times[(*fleet, "compiled_graph")])
    return "\n".join([head, *map(line, ordered)])
