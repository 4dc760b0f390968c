"""Checks whether a tokenizer from an untrusted model folder can be loaded safely. The tokenizer library aborts the
process when memory runs out, and a normalizer of a few bytes can turn one character into gigabytes. Therefore the
expansion by a chain of replacements is bounded, and the tokenizer is first tried in a separate process with tight
memory and time limits: `python -m midstream.model.tokenizer_check FILE`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.tokenizer_file import read_tokenizer
from midstream.python_process import bare_environment, python_command

# Maximum number of characters that normalizers may produce from one character; no tokenizer in use exceeds four.
MAX_EXPANSION = 64
MAX_BYTES = 256 << 20
_MEMORY_BYTES, _CPU_S, _WALL_S = 2 << 30, 15, 60
_PROBE_CHARACTERS = 4096


def check_tokenizer(file: Path, text: str) -> dict[str, Any]:
    """Return the fields of the tokenizer `text`, which was read from `file`; raise an error if loading or using it
    could end this process.

    Raises:
        ConfigError: The tokenizer is too large, expands text without bound, or fails in its own process.
        ValueError: `text` is not JSON.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES >> 20} MiB", field="model")
    fields: dict[str, Any] = json.loads(text)
    steps = [step for part in ("normalizer", "pre_tokenizer", "decoder") for step in _steps(fields.get(part))]
    for part in ("normalizer", "decoder"):
        expansion = 1
        for step in _steps(fields.get(part)):
            expansion *= _expansion(step)
        if expansion > MAX_EXPANSION:
            raise ConfigError(
                f"the {part} in {file} may expand one character to {expansion}; must be at most {MAX_EXPANSION}",
                field="model",
            )
    # The library does not check that a token is at least `stop` long, and the resulting panic is not an Exception.
    if any(step.get("type") == "Strip" and step.get("stop") for step in _steps(fields.get("decoder"))):
        raise ConfigError(
            f"the decoder in {file} strips the end of tokens, which crashes the tokenizer library", field="model"
        )
    # Byte-level tokenizers without a normalizer are known to be safe; not trying them makes starts faster.
    if fields.get("normalizer") is None and not any("pattern" in step for step in steps):
        return fields
    command = python_command("midstream.model.tokenizer_check", str(file))
    try:
        done = subprocess.run(
            command,
            env=bare_environment(RAYON_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,  # Ctrl-C must not look like a crash of the tokenizer
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the tokenizer in {file} takes too long", field="model") from None
    if done.returncode < 0:
        raise ConfigError(f"the tokenizer in {file} crashes the process that uses it", field="model")
    if done.returncode > 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        raise ConfigError(f"{file} is not a tokenizer: {reason[0][:500]}", field="model")
    return fields


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    pending = [part]
    while pending:
        step = pending.pop()
        if isinstance(step, dict):
            yield step
            pending += [item for value in step.values() if isinstance(value, list) for item in value]


def _expansion(step: dict[str, Any]) -> int:
    content = step.get("content", step.get("prepend", ""))
    return max(len(content), 1) if isinstance(content, str) and step.get("type") in ("Replace", "Prepend") else 1


def main() -> int:
    """Load and use the tokenizer given on the command line, within memory and time limits."""
    import tokenizers

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text = read_tokenizer(Path(sys.argv[1]))
    tokenizer = tokenizers.Tokenizer.from_str(text)
    fields = json.loads(text)
    patterns = json.dumps([fields.get("normalizer"), fields.get("pre_tokenizer")], ensure_ascii=False)
    printable = "".join(map(chr, range(32, 0x250)))
    probe = (printable + " a" * 64 + "a" * 64 + patterns)[:_PROBE_CHARACTERS]
    try:
        ids = tokenizer.encode(probe).ids
    except Exception:  # noqa: BLE001 (the library raises plain Exception)
        return 0  # not all of the characters have a token, which is an error only of the requests that have them
    tokenizer.decode(ids)
    if len(ids) > 4 * MAX_EXPANSION * len(probe):
        print(f"{len(probe)} characters became {len(ids)} tokens", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
