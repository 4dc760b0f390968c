"""Every example runs against one service and prints the expected output."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from midstream.client import Client
from midstream.client.retries import Retries
from midstream.errors import InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.executor import GenerationExecutor
from tests.integration.service import Service
from tests.ports import free_port

FOLDER = Path(__file__).parents[2] / "examples"
# The expected output, in order; there may be other output in between.
SHOWN: dict[str, list[str]] = {
    "streaming": [r"\w+ .*\w+", r"24 tokens, then: length|\d+ tokens, then: stop"],
    "chat": [r"^user: What", r"^assistant: .*Paris", r"^user: And", r"^assistant: \w+"],
    "resume": [r"^the first has '.+' and leaves", r"^the second has '.+'", r"together: True"],
    "executor": [r"^The sky is \w+", r"^Two and", r"^Water boils", r"^The sea is \w+", r"\w+", r"\w+"],
    "several_outputs": [r"^0: ['\"].+['\"]", r"^1: '.+'", r"^2: '.+'", r"again: True"],
    "beam_search": [r"-\d+\.\d{3} .*a token  '.+'\n\n", *[r"-\d+\.\d{3} .*a token  '.+'"] * 4],
    "stopping": [
        r"^at a word: '[^']*' \(stop, 'six'\)",
        r"^with the word: '[^']*six' \(stop, 'six'\)",
        r"^at a comma: '[^,]*' \(stop, 28\)",
        r"^at a comma, not before 6: '.{6,}' \(stop, 28\)",
        r"^a comma as the end id: '[^,]*' \(stop",
        r"^never: '.+' \(length, None\)",
    ],
    "steering": [
        r"^as it is: '.*blue",
        r"^not blue: (?!.*blue)",
        r"^a bias: '.*red",
        r"^penalties: '.+'",
        r"^no",
        r"^top",
    ],
    "log_probs": [r"^prompt +3575 +-\d+.*rank \d+", r"^output +\d+ \{\d+: -\d", r"^all of '.+': -\d"],
    "tensors": [
        r"^context logits: float32\[3, 49152\]",
        r"^generation logits: float32\[4, 49152\]",
        r"^hidden_states.30 of the prompt: float32\[3, 576\]",
        r"^hidden_states.30: float32\[4, 576\]",
        r"^topk_logits.3: float32\[4, 3\]",
        r"^topk_logits.3.ids: int32\[4, 3\]",
        r"^[45] steps, \d+\.\d ms",
    ],
    "post_processor": [r"^ann \[503, 506, 509, 512, 515\]", r"^robert \[506, 512", r"logits_post_processor_name: "],
    "guided_decoding": [
        r'^schema: \{"name": ".*", "age": \d+\}$',
        r"^json: [{\[]",
        r"^expression: (red|green|blue) fox(es)?$",
        r"^grammar: \d+ \+ .*\d",
        r"^parsed: \{'name'",
    ],
    "lora": [r"LoraInfo\(name='example'.*rank=4", r"^without: '.+'", r"^with it: '.+'", r"^loaded now: \[\]"],
    "prompt_tuning": [r"^plain: .* 3 prompt", r"first: .* 7 prompt", r"within: .* 5 prompt", r"alone: .* 4 prompt"],
    "speculative": [r"^the same output: True", r"^without: 3\d steps, 0 of 0", r"^with: [12]?\d steps, [1-9]"],
    "scheduling": [r"^tenant-1: 0 of", r"^tenant-1: [1-9]\d* of|^tenant-1: 0 of", r"^tenant-2: 0 of", r"^a deadline: "],
    "responses": [
        r"^the (short|endless) one: \['(LENGTH|CANCELLED)'\]",
        r"^the ",
        r"^\d+ requests completed; at most \d+ run",
    ],
    "batch_manager": [r"^request [12]: output_ids of shape", r"^request [12]:", r"^statistics: \["],
}


@pytest.fixture(scope="module")
def address(service: Service) -> str:
    return service.routers()[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_an_example_prints_the_expected_output(
    address: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FOLDER / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    monkeypatch.setattr(sys, "argv", [str(path), address])
    runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    place = 0
    for pattern in SHOWN[name]:
        found = re.compile(pattern, re.MULTILINE).search(text, place)
        assert found, f"{pattern!r} is not in {text[place:]!r}"
        place = found.end()


@pytest.mark.parametrize(
    ("name", "owner", "call", "error", "cure"),
    [
        ("post_processor", GenerationExecutor, "generate", UnsupportedError("none"), "Install tests/gpu_worker"),
        ("lora", Client, "load_lora", InvalidArgumentError("none"), "MIDSTREAM_ADAPTER_ROOT="),
    ],
)
def test_a_service_that_lacks_what_it_needs_is_explained(
    address: str,
    name: str,
    owner: type,
    call: str,
    error: MidstreamError,
    cure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(owner, call, refuse)
    monkeypatch.setattr(sys, "argv", [name, address])
    with pytest.raises(SystemExit, match=cure):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_says_that_no_service_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Retries.__init__
    monkeypatch.setattr(Retries, "__init__", lambda retries, timeout_s, _: start(retries, timeout_s, 0.0))
    monkeypatch.setattr(sys, "argv", [name, f"127.0.0.1:{free_port()}"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    text = capsys.readouterr().out + str(ended.value)
    assert "is the service running" in text
    assert "Traceback" not in text


def test_no_example_is_missing() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SHOWN.keys()
