"""Guides are checked in a separate process, within limits: abusive guides fail alone, and caches remain bounded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from midstream.errors import InvalidArgumentError, OverloadedError, UnsupportedError
from midstream.grammar.messages import Guide
from midstream.grammar.process import GrammarProcess
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline import grammar_check
from router.pipeline.grammar_check import GrammarChecker

LIMIT_S = 1.0
# Time limit for guides that must pass; it is long because the machine may stall for seconds.
PATIENT_S = 60.0
# Sufficient for one check, and for a restart of the process on a slow machine.
MOST_S = 60.0


@pytest.fixture(scope="module")
def checker(folder: ModelFolder) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(folder, limit_s=PATIENT_S)
    yield checker
    checker.close()


async def test_a_tokenizer_that_the_library_cannot_read_is_named(folder: ModelFolder, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"yes": 0, "no": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    checker = GrammarChecker(dataclasses.replace(folder, path=tmp_path, vocab_size=2, end_ids=()), limit_s=PATIENT_S)
    try:
        with pytest.raises(UnsupportedError, match="cannot read the model's tokenizer"):
            await checker.check(guide("REGEX", "yes|no"))
    finally:
        checker.close()


@pytest.fixture(scope="module")
def strict(folder: ModelFolder) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(folder, limit_s=LIMIT_S)
    yield checker
    checker.close()


def guide(kind: str, text: str) -> pb.GuidedDecodingConfig:
    return pb.GuidedDecodingConfig(guide_type=pb.GuideType.Value(f"GUIDE_TYPE_{kind}"), guide=text)


def nested(depth: int) -> str:
    return '{"type": "object", "properties": {"a": ' * depth + '{"type": "string"}' + "}}" * depth


GOOD = [
    ("JSON", ""),
    ("JSON_SCHEMA", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    ("JSON_SCHEMA", '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}'),
    ("JSON_SCHEMA", json.dumps({"enum": list(range(1000))})),
    ("REGEX", r"[0-9]{3}-[a-z]+"),
    ("REGEX", "(a*)*b"),
    ("REGEX", "(x+x+)+y"),
    ("EBNF_GRAMMAR", 'root ::= "yes" | "no"'),
    ("EBNF_GRAMMAR", 'root ::= root "a" | "b"'),
    ("EBNF_GRAMMAR", 'start: "yes" | "no"'),
]


async def test_a_model_without_end_ids_takes_guides(folder: ModelFolder) -> None:
    checker = GrammarChecker(dataclasses.replace(folder, end_ids=()), limit_s=PATIENT_S)
    await checker.check(guide("REGEX", "[0-9]{3}"))
    checker.close()


BAD = {
    "no JSON": ("JSON_SCHEMA", "{"),
    "no schema": ("JSON_SCHEMA", "3"),
    "no expression": ("REGEX", "("),
    "no grammar": ("EBNF_GRAMMAR", "root ::= missing"),
    "30,000 nestings in a schema": ("JSON_SCHEMA", nested(30_000)),
    "30,000 nestings in an expression": ("REGEX", "(" * 30_000 + "a" + ")" * 30_000),
    "30,000 nestings in a grammar": ("EBNF_GRAMMAR", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "a recursion without an end": ("JSON_SCHEMA", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    "half a million values": ("JSON_SCHEMA", json.dumps({"enum": list(range(500_000))})),
    "a product of expressions": (
        "JSON_SCHEMA",
        json.dumps({"type": "string", "allOf": [{"pattern": f".*{i}.{{50}}"} for i in range(200)]}),
    ),
}


@pytest.mark.parametrize(("kind", "text"), GOOD)
async def test_valid_guides_pass(checker: GrammarChecker, kind: str, text: str) -> None:
    await checker.check(guide(kind, text))


@pytest.mark.parametrize(("kind", "text"), BAD.values(), ids=BAD)
async def test_abusive_requests_fail_within_their_limit_and_later_ones_pass(
    strict: GrammarChecker, kind: str, text: str
) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidArgumentError) as raised:
        await strict.check(guide(kind, text))
    assert time.monotonic() - started < MOST_S
    assert raised.value.field == "guided_decoding.guide"
    assert len(raised.value.message) < 300
    # This check is repeated if it fails, because the machine may have stalled for longer than the limit.
    deadline, number = time.monotonic() + MOST_S, 0
    while problem := await problem_of(strict, guide("REGEX", f"after {kind} {number}")):
        assert "takes more than" in problem
        assert time.monotonic() < deadline
        number += 1


async def test_a_process_that_ends_is_not_called_slow(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(folder)
    ask = GrammarProcess.check

    def check_and_die(process: GrammarProcess, item: Guide) -> str:
        assert process.is_ready(60)
        os.kill(process._process.pid, signal.SIGKILL)  # as the kernel does, and a fault of the library
        return ask(process, item)

    monkeypatch.setattr(GrammarProcess, "check", check_and_die)
    problem = await problem_of(checker, guide("REGEX", "a"))
    assert problem == "needs too much memory to compile, or the grammar library cannot process it"
    monkeypatch.undo()
    await checker.check(guide("REGEX", "ab"))
    checker.close()


async def problem_of(checker: GrammarChecker, config: pb.GuidedDecodingConfig) -> str:
    try:
        await checker.check(config)
    except InvalidArgumentError as error:
        return error.message
    return ""


class Parts:
    """The parts of a guide; those in `optional` may be left out of `whole`, which then becomes `rest`."""

    divide = None

    def __init__(self, whole: pb.GuidedDecodingConfig, optional: str = "", **parts: pb.GuidedDecodingConfig) -> None:
        self._whole, self._optional, self._parts = whole, optional, parts

    def guide_parts(self) -> dict[str, pb.GuidedDecodingConfig]:
        return self._parts

    def leave_out(self, fields: Collection[str]) -> bool:
        if set(fields) != {self._optional}:
            return False
        self._whole.CopyFrom(guide("REGEX", "a|c"))
        return True


async def test_the_part_of_a_guide_that_does_not_compile_is_named(checker: GrammarChecker) -> None:
    whole, good, bad = guide("REGEX", "(a|(b)"), guide("REGEX", "a"), guide("REGEX", "(b")
    with pytest.raises(InvalidArgumentError) as raised:
        await checker.check(whole, Parts(whole, one=good, two=bad))
    assert raised.value.field == "two"
    with pytest.raises(InvalidArgumentError) as raised:
        await checker.check(whole, Parts(whole, one=good))
    assert raised.value.field == "guided_decoding.guide"
    await checker.check(good, Parts(good, two=bad))


async def test_a_part_that_does_not_compile_is_left_out_if_it_may_be(checker: GrammarChecker) -> None:
    whole, good, bad = guide("REGEX", "(a|(b)"), guide("REGEX", "a"), guide("REGEX", "(b")
    parts = Parts(whole, "two", one=good, two=bad)
    await checker.check(whole, parts)
    assert whole.guide == "a|c"


async def test_unique_guides_keep_the_cache_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_CHECKED", 50)
    for number in range(1000):
        await checker.check(guide("JSON_SCHEMA", json.dumps({"const": number})))
    assert checker.num_checked <= 50 + len(GOOD) + 2 * len(BAD)


async def test_too_many_waiting_streams_are_rejected(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 0)
    with pytest.raises(OverloadedError):
        await checker.check(guide("REGEX", "never seen"))


async def test_requests_with_the_same_guide_share_a_check(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Guide] = []
    check = checker._check

    def counted(one: Guide) -> str:
        checks.append(one)
        return check(one)

    monkeypatch.setattr(checker, "_check", counted)
    same = guide("REGEX", "shared[0-9]")
    first = asyncio.create_task(checker.check(same))
    others = [asyncio.create_task(checker.check(same)) for _ in range(2 * grammar_check.MAX_WAITING)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(*others)
    assert len(checks) == 1
