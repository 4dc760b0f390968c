"""Every example of the HTTP APIs runs against one service and prints the expected output."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.integration.service import Service
from tests.ports import free_port

FOLDER = Path(__file__).parents[2] / "examples" / "http"
# The expected output, in order; there may be other output in between.
SHOWN: dict[str, list[str]] = {
    "openai_chat": [r"^smollm2: .*Paris", r"^\d+ tokens$"],
    "anthropic_messages": [r"^\d+ tokens of input", r"Paris", r"^(end_turn|max_tokens) after \d+ tokens"],
    "tools": [r"^weather\('(Paris|Rome)'\) is '.* degrees'", r"^answer: \w+"],
    "json_schema": [r"^city: .*, country: (France|Italy|Spain)$"],
    "batches": [r"^the batch is completed", r"^line-0: '.+'", r"^line-1: '.+'", r"^line-2: '.+'"],
    "images": [r"^refused: .*the model 'smollm2' reads no images"],
}


@pytest.fixture(scope="module")
def url(service: Service) -> str:
    return f"http://{service.processes('router')[0]['addresses']['http']}"


def test_no_example_is_missing() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_prints_the_expected_output(
    url: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FOLDER / f"{name}.py"
    assert ast.get_docstring(ast.parse(path.read_text()))
    monkeypatch.setattr(sys, "argv", [str(path), url])
    runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    place = 0
    for pattern in SHOWN[name]:
        found = re.compile(pattern, re.MULTILINE).search(text, place)
        assert found, f"{pattern!r} is not in {text[place:]!r}"
        place = found.end()


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_says_that_no_service_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._constants.DEFAULT_MAX_RETRIES", 0)
    monkeypatch.setattr(sys, "argv", [name, f"http://127.0.0.1:{free_port()}"])
    with pytest.raises(SystemExit, match="Is the service running, and is MIDSTREAM_API_KEY set"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
