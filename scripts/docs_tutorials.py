"""Tutorials are run while the site is built, and what their code prints stands below it.

The ``python`` and ``sh`` blocks of a page in docs/tutorials run in turn, in one process and an empty folder;
a ``python`` block with a title is a file of that name. ``console`` and other blocks are only shown. An error
ends the build. ``mkdocs serve`` runs nothing.

Named in mkdocs.yml under ``hooks``; MkDocs calls the functions ``on_...``.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = re.compile(r'^```(python|sh)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "\x1e"
TIMEOUT_S = 600
_is_served = False


def on_startup(command: str, dirty: bool) -> None:
    """Remember whether pages are only looked at."""
    global _is_served
    _is_served = command == "serve"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str | None:
    """Run a tutorial; raises what `run` does."""
    if not page.file.src_uri.startswith("tutorials/") or _is_served:
        return None
    start = time.monotonic()
    printed = run(markdown, Path(page.file.src_uri).stem)
    seconds = time.monotonic() - start
    print(f"{page.file.src_uri}: {seconds:.0f} s", flush=True)
    page.meta["hide"] = ["toc"]  # code is wide
    here = f"{os.cpu_count()} cores ({platform.machine()})"
    note = f"*This page was run in {seconds:.0f} s on {here}, without a GPU.*"
    return f"{with_output(markdown, printed)}\n---\n\n{note}\n"


def run(markdown: str, name: str) -> list[str]:
    """Run the blocks of a page; gives what each printed. RuntimeError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(as_script(markdown), encoding="utf-8")
        programs = str(Path(sys.executable).parent)
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(Path(folder, ".cache")),  # as on a machine that sees it for the first time
        }
        done = subprocess.run(
            [sys.executable, str(path)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        raise RuntimeError(f"{name}.md failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout.split(END_OF_BLOCK + "\n")[:-1]


def as_script(markdown: str) -> str:
    """The blocks as one program, each in the lines that it has in the page, so that errors name those."""
    lines: list[str] = []
    for block in BLOCK.finditer(markdown):
        language, title, body = block.groups()
        if title:
            body = f"__import__('pathlib').Path({title!r}).write_text({body!r})"
        elif language == "sh":
            body = f"__import__('subprocess').run(['bash', '-euc', {body!r}], check=True)"
        lines += [""] * (markdown.count("\n", 0, block.start(3)) - len(lines))
        lines += [*body.splitlines(), f"print({END_OF_BLOCK!r}, flush=True)"]
    return "\n".join(lines)


def with_output(markdown: str, printed: list[str]) -> str:
    """The page with what each block printed below it."""
    outputs = iter(printed)

    def shown(block: re.Match[str]) -> str:
        output = next(outputs).strip("\n")
        return f"{block[0]}\n\n``` {{ .text .printed .no-copy }}\n{output}\n```" if output else block[0]

    return BLOCK.sub(shown, markdown)
