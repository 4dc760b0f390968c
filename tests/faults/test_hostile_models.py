"""Malicious model files: templates that escape or use excessive resources, absurd dimensions, and executable code."""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midstream.config import WorkerConfig
from midstream.errors import ConfigError, InvalidArgumentError, MidstreamError
from midstream.model import tokenizer_check
from midstream.model.folder import open_model_folder
from midstream.model.prepare.gguf_file import read_gguf_head
from midstream.model.tokenizer import Tokenizer
from router.pipeline.chat_template import ChatTemplate
from tests.integration.named_processes import ROOT

USER = [{"role": "user", "content": "hi"}]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ (range | attr('__class__')).__init__.__globals__ }}",
    "{{ '{0.__class__.__base__}'.format(1) }}",
    "{{ dict.fromkeys.__self__.__mro__[1] }}",
    "{% set x = messages.append(1) %}",
    "{{ raise_exception('no tools') }}",
    "{{ 1 / 0 }}",
    "{{ messages[7].content.upper() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]
BOMBS = [
    "{{ x * 99999999999 }}",
    "{{ n ** (n ** n) }}",
    "{{ x.ljust(99999999999) }}",
    "{{ '%99999999999d' % n }}",
    "{{ (x * 1000000) | replace(x, x * 1000000) }}",
    "{{ (x ~ '\\n' ~ x) | indent(99999999999) }}",
    "{{ range(99999999999) | list }}",
    "{% set ns = namespace(x=x) %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(10000000) %}{{ x * 1000 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
]


def refusal(template: ChatTemplate, content: str) -> str:
    """Return the reason why a conversation is rejected, or an empty string if it is accepted."""
    try:
        template.render([{"role": "user", "content": content}])
    except InvalidArgumentError as error:
        return error.message if error.field == "chat" else ""
    return ""


def chosen(sources: list[str]) -> str:
    """Return one template for all cases; the first message selects the case to render.

    Constants are replaced by `x`, a letter, and `n`, a number, because constants would be evaluated when the template
    is compiled."""
    values = "{% set x, n = 'x' ~ messages[0].content[:0], messages[0].content | length + 9 %}"
    branches = "".join(f"{{% elif messages[0].content == '{i}' %}}{source}" for i, source in enumerate(sources))
    return values + "{% if messages[0].content == 'hi' %}fine" + branches + "{% endif %}"


def test_templates_that_escape_or_fail_are_refused() -> None:
    with closing(ChatTemplate(chosen(ESCAPES), {})) as template:
        for i, source in enumerate(ESCAPES):
            assert refusal(template, str(i)), source
        assert template.render(USER) == "fine"


def test_templates_that_explode_are_ended_and_the_next_conversation_is_rendered() -> None:
    """The limits of the template process end each template; this process and the next conversation are not affected."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with closing(ChatTemplate(chosen(BOMBS), {})) as template:
        for i, bomb in enumerate(BOMBS):
            assert re.search("uses|produces|takes|fails|ended", refusal(template, str(i))), bomb
            assert template.render(USER) == "fine"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "kilobytes"


@pytest.mark.parametrize("source", ["{{ '%99999999999d' % 1 }}", "{{ 'x' | center(99999999999) }}"])
def test_a_template_that_explodes_at_compile_time_is_rejected(source: str) -> None:
    """Jinja evaluates constant expressions at compile time."""
    with pytest.raises(MidstreamError), closing(ChatTemplate(source, {})) as template:
        template.render(USER)


def test_code_that_escapes_the_template_sandbox_has_no_files_network_or_secrets() -> None:
    code = (
        "import os, socket\n"
        "from router.pipeline.template_renderer import _confine\n"
        "_confine()\n"
        "for attempt in (lambda: open('/etc/passwd'), lambda: open('/tmp/x', 'w'), socket.socket, os.pipe,\n"
        "                lambda: bytearray(1 << 30)):\n"
        "    try:\n"
        "        attempt()\n"
        "        os.write(1, b'1')\n"
        "    except (OSError, MemoryError):\n"
        "        os.write(1, b'0')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240, cwd=ROOT, check=False)
    assert result.stdout == b"00000", result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder like that of a prepared model, with a weight file of a few bytes."""
    model = open_model_folder("smollm2")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model.path / name).read_bytes())
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return tmp_path


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields), encoding="utf-8")


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 2**40},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1 << 20},
        {"vocab_size": 2**62},
        {"max_position_embeddings": 10**12},
        {"max_position_embeddings": 1e300},
        {"vocab_size": -1},
        {"hidden_size": True},
        {"hidden_size": "576"},
        {"model_type": ["llama"]},
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}, "model_type": "evil"},
    ],
)
def test_a_configuration_out_of_bounds_is_refused_by_name(folder: Path, fields: dict[str, object]) -> None:
    open_model_folder(str(folder))
    (folder / "midstream.json").unlink()
    change(folder / "config.json", **fields)
    with pytest.raises(ConfigError) as raised:
        open_model_folder(str(folder))
    assert next(iter(fields)) in str(raised.value)


def test_a_tokenizer_with_custom_code_is_rejected(folder: Path) -> None:
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Tokenizer", None]})
    with pytest.raises(ConfigError, match=r"tokenizer_config.json.*auto_map"):
        open_model_folder(str(folder))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_code_in_the_folder_of_a_supported_family_is_not_run(implementation: str, tmp_path: Path) -> None:
    from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

    folder, evidence = tmp_path / "model", tmp_path / "evidence"
    make_tiny_model(folder, "Llama")
    code = f"open({str(evidence)!r}, 'w')\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    (folder / "modeling_evil.py").write_text(code, encoding="utf-8")
    change(
        folder / "config.json",
        auto_map={"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"},
    )
    make_runner(folder, implementation=implementation)
    assert not evidence.exists()


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(num_tensors: int, num_values: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + body


LARGE = 1 << 62
HOSTILE_GGUF = [
    gguf(LARGE, 0),
    gguf(0, LARGE),
    gguf(0, 1, struct.pack("<Q", LARGE)),
    gguf(0, 1, gguf_string("a") + struct.pack("<IQ", 8, LARGE)),
    gguf(0, 1, gguf_string("a") + struct.pack("<IIQ", 9, 4, LARGE)),
    gguf(0, 1, gguf_string("a") + struct.pack("<IIQ", 9, 8, LARGE)),
    gguf(0, 1, gguf_string("a") + struct.pack("<IIQ", 9, 9, LARGE)),
    gguf(1, 0, gguf_string("w") + struct.pack("<I", 2**31)),
    gguf(1, 0, gguf_string("w") + struct.pack("<IQIQ", 1, 1, 0, LARGE)),
    gguf(0, 1, gguf_string("general.alignment") + struct.pack("<IQ", 10, LARGE)),
    b"GGUF",
    b"",
]


@pytest.mark.parametrize("data", HOSTILE_GGUF)
def test_inflated_counts_in_gguf_are_refused_before_memory_is_taken(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with limited_memory(), pytest.raises(ConfigError):
        read_gguf_head(path)


def safetensors(header: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header


HOSTILE_SAFETENSORS: list[Callable[[], bytes]] = [
    lambda: safetensors(b"{}", LARGE),
    lambda: safetensors(json.dumps({"x": {"dtype": "F32", "shape": [LARGE], "data_offsets": [0, 4 * LARGE]}}).encode()),
    lambda: safetensors(json.dumps({"x": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}).encode()),
    lambda: safetensors(json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [8, 0]}}).encode()),
    lambda: safetensors(b"[" * 100_000),
    lambda: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    lambda: b"",
]


@pytest.mark.parametrize("make", HOSTILE_SAFETENSORS)
def test_inflated_headers_of_safetensors_are_refused(tmp_path: Path, make: Callable[[], bytes]) -> None:
    from gpu_worker.models.weights.files import SafetensorsFiles

    path = tmp_path / "model.safetensors"
    path.write_bytes(make())
    with limited_memory(), pytest.raises(ConfigError):
        SafetensorsFiles([path])


def test_a_configuration_cannot_make_a_worker_allocate_memory(folder: Path) -> None:
    """The dimensions are within bounds, but do not match the weights."""
    change(folder / "config.json", hidden_size=1 << 20, intermediate_size=1 << 22, num_hidden_layers=512)
    from gpu_worker.model_runner import ModelRunner

    model = open_model_folder(str(folder))
    with limited_memory(), pytest.raises(ConfigError, match="the weights lack the tensor"):
        ModelRunner(WorkerConfig(model=str(folder), device="cpu", max_kv_tokens=1024), model)


def test_no_process_starts_on_a_hostile_model(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Model"}, model_type="evil")
    ports = ("--port", "0", "--http-port", "0")
    commands = {
        "scheduler": ("--worker-port", "0", "--journal", "off", *ports),
        "router": ports,
        "detokenizer": ports,
        "gpu_worker": ("--http-port", "0"),
    }
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", name, "--model", str(folder), *flags],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name, flags in commands.items()
    }  # fmt: skip
    for name, process in processes.items():
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 2, (name, errors)
        assert "auto_map" in errors
        assert "Traceback" not in errors


class limited_memory:  # noqa: N801 (used as a function)
    """Limit this process to one gigabyte more than it uses now."""

    def __enter__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), self._limits[1]))

    def __exit__(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._limits)


def replaced(pattern: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "aa")] * 40}}, "normalizer .* may expand"),
        ({"normalizer": replaced("a", "b" * 10_000)}, "normalizer .* may expand"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 100}]}},
            "normalizer .* may expand",
        ),
        ({"normalizer": {"type": "Unknown"}}, "is not a tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": [replaced("a", "aaaa")] * 20}}, "decoder .* may expand"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 1}}, "decoder .* crashes the tokenizer lib"),
    ],
)
def test_a_tokenizer_that_explodes_is_rejected_without_a_crash(
    folder: Path, fields: dict[str, object], reason: str
) -> None:
    change(folder / "tokenizer.json", **fields)
    with pytest.raises(ConfigError, match=reason):
        Tokenizer(folder)


def test_a_tokenizer_that_crashes_crashes_only_the_checking_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = {"type": "Sequence", "normalizers": [replaced("a", "a" * 1000)] * 4}
    change(folder / "tokenizer.json", normalizer=bomb)
    monkeypatch.setattr("midstream.model.tokenizer_check.MAX_EXPANSION", 1 << 50)  # as if the format were unknown
    with pytest.raises(ConfigError, match="crashes the process that uses it"):
        Tokenizer(folder)


def test_a_tokenizer_is_limited_in_size_and_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder / "tokenizer.json", normalizer={"type": "NFC"})
    monkeypatch.setattr(tokenizer_check, "_WALL_S", 0.001)
    with pytest.raises(ConfigError, match="takes too long"):
        Tokenizer(folder)
    monkeypatch.setattr(tokenizer_check, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="larger than"):
        Tokenizer(folder)


def test_the_process_that_tries_a_tokenizer_has_limits(folder: Path) -> None:
    program = (
        "import resource as r, sys; from midstream.model.tokenizer_check import main; main();"
        "print(*(r.getrlimit(limit)[1] for limit in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_CORE)))"
    )
    command = [sys.executable, "-c", program, str(folder / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2 << 30), "15", "0"]


def test_the_process_that_tries_a_tokenizer_finds_the_packages_of_pythonpath(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, marker = tmp_path / "packages", tmp_path / "imported"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    change(folder / "tokenizer.json", normalizer={"type": "NFC"})
    Tokenizer(folder)
    assert marker.exists()


def test_an_ordinary_normalizer_is_accepted(folder: Path) -> None:
    change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})
    assert Tokenizer(folder).encode("plain text")
