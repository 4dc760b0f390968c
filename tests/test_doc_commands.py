"""Every fenced command of the README and the docs runs in a test, or is marked with the reason why not.

The line before a fence, an HTML comment, says how it is run:

    <!-- run -->               executed here; cheap
    <!-- run: service -->      executed while a service runs on the default ports
    <!-- run: all -->          executed; it starts a service on the default ports by itself, or takes long
    <!-- not run: REASON -->   not executed

`TEST_ALL_DOC_COMMANDS=1 pytest tests/test_doc_commands.py` executes the second and third kind too; that takes
minutes, and ports 50051 and 8000 must be free.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT

_FENCE = re.compile(r"^(?P<before>[^\n]*)\n```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (?:(run)(?:: (service|all))?|not run: (\S.*)) -->")
_RUNS_ALL = bool(os.environ.get("TEST_ALL_DOC_COMMANDS"))
_TIMEOUT_S = 400


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind` is "run", "service", "all" or "not run", or empty if the mark is missing."""

    page: str
    line: int
    language: str
    text: str
    kind: str


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for found in _FENCE.finditer("\n" + text):
        mark = _MARK.fullmatch(found["before"])
        kind = "" if mark is None else "not run" if mark[3] else mark[2] or mark[1]
        line = text.count("\n", 0, found.start("text") - 1)
        yield Block(page, line, found["language"], found["text"], kind)


BLOCKS = [block for page in PAGES for block in blocks_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))]
RUN = [
    pytest.param(
        block,
        id=f"{block.page}:{block.line}",
        marks=[
            pytest.mark.skipif(block.kind != "run" and not _RUNS_ALL, reason="TEST_ALL_DOC_COMMANDS"),
            pytest.mark.timeout(_TIMEOUT_S + 20),
        ],
    )
    for block in BLOCKS
    if block.kind in ("run", "service", "all")
]


def test_every_block_is_run_or_says_why_not() -> None:
    assert [f"{block.page}:{block.line}" for block in BLOCKS if not block.kind] == []
    assert sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES) == 2 * len(BLOCKS)
    assert {block.kind for block in BLOCKS} == {"run", "service", "all", "not run"}


@pytest.mark.parametrize(
    ("mark", "kind"),
    [("<!-- run -->", "run"), ("<!-- run: all -->", "all"), ("<!-- not run: slow -->", "not run"), ("A text.", "")],
)
def test_the_line_before_a_code_block_labels_it(mark: str, kind: str) -> None:
    (block,) = blocks_of("a.md", f"# A\n{mark}\n```sh\nmidstream status\n```\n")
    assert block == Block("a.md", 3, "sh", "midstream status\n", kind)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables of a new user: PATH begins with this environment's `midstream` and `python`, and
    the home folder is separate.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    return theirs | {"PATH": path, "MIDSTREAM_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def running(request: pytest.FixtureRequest, environment: dict[str, str]) -> Iterator[None]:
    block: Block = request.getfixturevalue("block")
    if block.kind != "service":
        yield
        return
    subprocess.run(["midstream", "serve", "smollm2", "--detach"], check=True, env=environment, timeout=_TIMEOUT_S)
    yield
    subprocess.run(["midstream", "down"], check=True, env=environment, timeout=_TIMEOUT_S)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("block", RUN)
def test_it_runs(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*command, block.text],
        cwd=ROOT if block.kind == "all" else tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
