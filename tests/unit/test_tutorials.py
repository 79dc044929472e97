"""Tutorials are run as they stand: blocks in turn, files with titles, and what is printed shown below."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "docs_tutorials.py"

PAGE = """\
# A page

```python title="given.py"
number = 6
```

```python
import given
number = 7 * given.number
```

```sh
cat given.py
```

```console
rm -rf never-run
```

```python
print("the answer:", number)
```
"""


@pytest.fixture(scope="module")
def tutorials() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tutorials", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_blocks_print_stands_below_them(tutorials: ModuleType) -> None:
    printed = tutorials.run(PAGE, "page")
    assert printed == ["", "", "number = 6\n", "the answer: 42\n"]
    shown = tutorials.with_output(PAGE, printed)
    assert shown.count(".printed") == 2
    assert shown.startswith(PAGE[: PAGE.index("cat given.py")])
    assert shown.index("number = 6\n```\n\n```console") > shown.index("cat given.py")
    assert shown.endswith("the answer: 42\n```\n")


@pytest.mark.parametrize("broken", ["```python\n1 / 0\n```\n", "```sh\nfalse\n```\n"])
def test_a_block_that_fails_ends_the_build_with_its_line(tutorials: ModuleType, broken: str) -> None:
    page = PAGE + broken
    line = page.splitlines().index(broken.splitlines()[1]) + 1
    with pytest.raises(RuntimeError, match=rf'page.py", line {line}, in <module>'):
        tutorials.run(page, "page")


def test_only_tutorials_are_run(tutorials: ModuleType) -> None:
    class Page:
        class file:  # noqa: N801
            src_uri = "layout.md"

    assert tutorials.on_page_markdown("```python\n1 / 0\n```\n", Page, None, None) is None
