"""Editing record files, with a checksum that fits: what reading must refuse by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def edit(path: Path, steps: Sequence[str | int], value: Any) -> None:
    """Set what lies at ``steps`` in the record of a file."""
    document = json.loads(path.read_text())
    kind = document["trainmux"]
    inner = document[kind]
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = value
    canonical = json.dumps([kind, document["version"], document[kind]], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(document))
