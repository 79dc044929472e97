"""``python -m benchmarks``: every benchmark by name."""

from __future__ import annotations

from benchmarks.bench.command import app

if __name__ == "__main__":
    app()
