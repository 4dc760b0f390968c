"""Runs the official JSON-Schema-Test-Suite against our grammars and against llguidance's own: `python -m
benchmarks.json_schema`.

For each schema that compiles, every instance of the suite is spelled as our grammars write it, and the grammar must
accept it only if it is valid. Objects are left open, as the standard says. The suite comes with the source package of
jsonschema, which is downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llguidance

from midstream.grammar.compile import GuideError, GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.json_schema.formats import FORMATS
from midstream.grammar.messages import Guide
from midstream.model.folder import open_model_folder

_PACKAGE = "jsonschema==4.26.0"
_DRAFTS = {"draft2020-12": {}, "draft7": {"$schema": "http://json-schema.org/draft-07/schema#"}}
_OPEN = {"x-guidance": {"open_objects": True}}
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LABELS = ("schemas", "refused", "valid accepted", "valid refused", "invalid accepted", "invalid refused")
Compile = Callable[[dict[str, Any] | bool], llguidance.LLMatcher]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="Show each instance that is accepted wrongly.")
    arguments = parser.parse_args()
    folder = open_model_folder("smollm2")
    tokenizer = load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))

    def ours(schema: dict[str, Any] | bool) -> llguidance.LLMatcher:
        opened = {**schema, **_OPEN} if isinstance(schema, dict) else schema
        return compile_guide(Guide("json_schema", json.dumps(opened)), tokenizer)

    def own_of_library(schema: dict[str, Any] | bool) -> llguidance.LLMatcher:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_STYLE)
            matcher = llguidance.LLMatcher(tokenizer.library, grammar, log_level=0)
        except ValueError as error:
            raise GuideError(str(error)) from None
        if matcher.is_error():
            raise GuideError(matcher.get_error())
        return matcher

    with tempfile.TemporaryDirectory() as name:
        groups = list(_suite(Path(name)))
    print("| | " + " | ".join(_LABELS) + " |\n|" + " --- |" * (len(_LABELS) + 1))
    for label, make in (("Midstream", ours), ("llguidance", own_of_library)):
        counts, wrong = _run(groups, make, tokenizer)
        print(f"| {label} | " + " | ".join(str(counts[name]) for name in _LABELS) + " |", flush=True)
        for line in wrong if arguments.show else ():
            print(f"  {line}", file=sys.stderr)


def _suite(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the groups of the suite: a schema, and its instances."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, _PACKAGE], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (tests,) = folder.glob("*/json/tests")
    for draft, more in _DRAFTS.items():
        formats = [tests / draft / "optional" / "format" / f"{name}.json" for name in FORMATS]
        # In `format.json`, no format is enforced.
        required = [file for file in sorted((tests / draft).glob("*.json")) if file.name != "format.json"]
        for file in [*required, *(file for file in formats if file.exists())]:
            for group in json.loads(file.read_text(encoding="utf-8")):
                schema = group["schema"]
                yield {**group, "file": file.name, "schema": {**more, **schema} if isinstance(schema, dict) else schema}


def _run(groups: list[dict[str, Any]], make: Compile, tokenizer: GuideTokenizer) -> tuple[Counter[str], list[str]]:
    """Return the counts by label, and a line for each instance that is accepted wrongly."""
    counts, wrong = Counter[str](), list[str]()
    for group in groups:
        try:
            matcher = make(group["schema"])
        except GuideError:
            counts["refused"] += 1
            continue
        counts["schemas"] += 1
        for test in group["tests"]:
            text = _spelled(test["data"])
            verdict = "accepted" if _accepts(tokenizer, matcher, text) else "refused"
            counts[f"{'valid' if test['valid'] else 'invalid'} {verdict}"] += 1
            if verdict == "accepted" and not test["valid"]:
                wrong.append(f"{group['file']}: {group['description']}: {test['description']}: {text[:80]}")
    return counts, wrong


def _accepts(tokenizer: GuideTokenizer, matcher: llguidance.LLMatcher, text: str) -> bool:
    matcher, tokens = matcher.deep_copy(), tokenizer.library.tokenize_str(text)
    is_valid = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
    return bool(is_valid and matcher.is_accepting())


def _spelled(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_spelled(name)}: {_spelled(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
