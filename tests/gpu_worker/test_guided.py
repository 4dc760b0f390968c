"""Grammars: tokens sampled from random logits conform to them, even after preemptions and the death of the grammar
process.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.sampling.guided import Constraints, Guides
from gpu_worker.sampling.sampler import Sampler
from midstream.errors import InvalidArgumentError, UnavailableError
from midstream.grammar import child
from midstream.grammar.compile import compile_guide, load_tokenizer
from midstream.grammar.messages import OVERRUN, READY, WAITING, Guide
from midstream.grammar.process import GrammarProcess
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from tests.gpu_worker.tiny_models import ints

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 999, "minimum": 0}, "tags": {"enum": ["a", "b"]}},
    "required": ["id", "tags"],
    "additionalProperties": False,
}
GUIDES = [
    Guide("json_schema", json.dumps(SCHEMA)),
    Guide("regex", "[0-9]{2,4}-(yes|no)"),
    Guide("ebnf", 'root ::= ("ab" | "c")'),
]
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    return open_model_folder("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder: ModelFolder) -> Tokenizer:
    return Tokenizer(folder.path)


class Machine:
    """Rows whose logits are random functions of (seed, position)."""

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self.rows = Rows(8, 256, 16, 8, folder.vocab_size)
        self.guides = Guides(self.rows, self.start)
        self.sampler = Sampler(self.rows)
        self.process: GrammarProcess | None = None
        self.num_starts = 0

    def start(self) -> GrammarProcess:
        self.num_starts += 1
        self.process = GrammarProcess(self.folder)
        assert self.process.is_ready(60)
        return self.process

    def add(self, row: int, guide: Guide | None, seed: int, output: list[int] | None = None, **sampling: Any) -> None:
        params = SamplingParams(seed=seed, **{"end_ids": self.folder.end_ids, **sampling})
        tokens = ints([*PROMPT, *(output or [])])
        new = NewSequence(row=row, token_ids=tokens, num_prompt_tokens=3, sampling=params, guide=guide)
        self.rows.add(new)

    def constraints(self, rows: list[int]) -> Constraints:
        return self.guides.answer() if self.guides.ask(ints(rows), []) else Constraints()

    def step(self, rows: list[int]) -> dict[int, Exception]:
        """Sample tokens; retry rows whose grammar is not available yet."""
        errors: dict[int, Exception] = {}
        while rows:
            places = [int(self.rows.seeds[row]) * 1000 + int(self.rows.lengths[row]) for row in rows]
            noise = [np.random.default_rng(place).normal(0, 3, self.folder.vocab_size) for place in places]
            logits = torch.from_numpy(np.stack(noise).astype(np.float32))
            sampled = self.sampler.sample(logits, ints(rows), self.constraints(rows))
            failed = {rows[place]: error for place, error in sampled.errors}
            done = [place for place, row in enumerate(rows) if row not in failed]
            self.rows.append_tokens(ints([rows[place] for place in done]), sampled.token_ids[done])
            errors |= {row: error for row, error in failed.items() if not isinstance(error, UnavailableError)}
            rows = [row for row, error in failed.items() if isinstance(error, UnavailableError)]
        return errors

    def output(self, row: int) -> list[int]:
        return self.rows.tokens[row, 3 : self.rows.lengths[row]].tolist()  # type: ignore[no-any-return]

    def run(self, rows: list[int], num_tokens: int = 60) -> None:
        """Run until each row has ended, for at most `num_tokens` steps."""
        for _ in range(num_tokens):
            left = [row for row in rows if not self.has_ended(row)]
            if not left:
                return
            assert self.step(left) == {}

    def has_ended(self, row: int) -> bool:
        return any(token in self.folder.end_ids for token in self.output(row))


@pytest.fixture(scope="module")
def machine(folder: ModelFolder) -> Iterator[Machine]:
    machine = Machine(folder)
    yield machine
    machine.guides.close()


def check(guide: Guide, text: str) -> None:
    if guide.kind == "json_schema":
        value = json.loads(text)
        assert value.keys() == {"id", "tags"}
        assert 0 <= value["id"] <= 999
        assert value["tags"] in ("a", "b")
    elif guide.kind == "regex":
        assert re.fullmatch(guide.text, text)
    else:
        assert text in ("ab", "c")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ended_outputs_match_their_guides(machine: Machine, tokenizer: Tokenizer, temperature: float) -> None:
    for row in range(6):
        machine.add(row, GUIDES[row % 3], seed=row, temperature=temperature)
    machine.add(6, None, seed=6, temperature=temperature)
    machine.run([0, 1, 2, 3, 4, 5])
    for row in range(6):
        assert machine.has_ended(row)
        check(GUIDES[row % 3], tokenizer.decode(machine.output(row)))
    assert machine.constraints([6]) == Constraints()


def test_a_row_rebuilt_from_its_tokens_continues_unchanged(machine: Machine) -> None:
    machine.add(0, GUIDES[0], seed=40)
    machine.run([0])
    whole = machine.output(0)
    for length in range(1, len(whole)):
        machine.add(length % 3, GUIDES[0], seed=40, output=whole[:length])
        machine.run([length % 3])
        assert machine.output(length % 3) == whole


def test_the_death_of_the_process_changes_nothing(machine: Machine) -> None:
    for row in (0, 1):
        machine.add(row, GUIDES[0], seed=50 + row)
    machine.run([0, 1])
    whole = [machine.output(row) for row in (0, 1)]
    for row in (0, 1):
        machine.add(row, GUIDES[0], seed=50 + row)
    machine.run([0, 1], num_tokens=3)
    assert machine.process is not None
    starts = machine.num_starts
    machine.process._process.kill()
    machine.run([0, 1])
    assert [machine.output(row) for row in (0, 1)] == whole
    assert machine.num_starts == starts + 1


def test_a_guide_over_which_the_process_dies_is_refused_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_masks, deadly = GrammarProcess.take_masks, Guide("regex", "deadly")
    asked: list[set[str]] = []

    def ask_masks(process: GrammarProcess, items: list[dict[str, Any]]) -> None:
        asked.append({machine.rows.guides[item["row"]].guide.text for item in items})
        plain(process, items)

    def die(process: GrammarProcess) -> tuple[list[str], bytes]:
        if deadly.text in asked[-1]:
            raise TimeoutError
        return take_masks(process)

    plain = GrammarProcess.ask_masks
    monkeypatch.setattr(GrammarProcess, "ask_masks", ask_masks)
    monkeypatch.setattr(GrammarProcess, "take_masks", die)
    machine.add(0, deadly, seed=1)
    machine.add(1, GUIDES[1], seed=2)
    machine.add(2, GUIDES[2], seed=3)
    errors = machine.step([0, 1, 2])
    assert errors.keys() == {0}
    assert isinstance(errors[0], InvalidArgumentError)
    assert errors[0].field == "guided_decoding.guide"
    assert len(machine.output(1)) == len(machine.output(2)) == 1
    # One attempt contained only this guide, which is therefore refused without another attempt.
    assert asked[-1] == {deadly.text} or {deadly.text} in asked
    count = sum(deadly.text in texts for texts in asked)
    machine.add(3, deadly, seed=4)
    assert machine.step([3]).keys() == {3}
    assert sum(deadly.text in texts for texts in asked) == count


def test_a_custom_end_token_is_possible_only_after_the_guide_is_complete(
    machine: Machine, tokenizer: Tokenizer
) -> None:
    end = tokenizer.encode("!")[0]
    machine.add(0, GUIDES[1], seed=60, end_ids=(end,))
    while end not in machine.output(0):
        assert machine.step([0]) == {}
        assert len(machine.output(0)) < 20
    check(GUIDES[1], tokenizer.decode(machine.output(0)[:-1]))
    # If only the end id is allowed, a constraint that bans it, here min_tokens, is dropped.
    machine.add(1, GUIDES[2], seed=61, min_tokens=6)
    for _ in range(6):
        assert machine.step([1]) == {}
    output = machine.output(1)
    first = next(i for i, token in enumerate(output) if token in machine.folder.end_ids)
    check(GUIDES[2], tokenizer.decode(output[:first]))
    assert set(output[first:]) <= set(machine.folder.end_ids)


@pytest.fixture(scope="module")
def server(folder: ModelFolder) -> child.GrammarServer:
    tokens = load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))
    return child.GrammarServer(tokens, limit_s=30.0)


def opened(row: int, kind: str, text: str) -> dict[str, Any]:
    return {"row": row, "is_sampled": True, "guide": [kind, text], "end_ids": [2], "tokens": []}


def test_a_guide_that_is_being_compiled_delays_no_other_request(server: child.GrammarServer) -> None:
    """One of two guides takes a second to compile; the mask of the other guide is available at once."""
    slow = opened(0, "json_schema", json.dumps({"enum": [f"value {i}" for i in range(20_000)]}))
    states, masks = server.masks([slow, opened(1, "regex", "quick")])
    while states[1] == WAITING:  # on a slow machine, several attempts may be necessary
        states, masks = server.masks([{"row": 1, "is_sampled": True, "tokens": []} | {"row": row} for row in (0, 1)])
    assert states[1] == READY
    assert len(masks) == states.count(READY) * 49_152 // 8


def test_only_guides_that_use_too_much_processor_time_overrun(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two guides occupy both threads until they exceed the limit; a third, which waits for a thread, does not."""
    is_over = threading.Event()

    def compile_slowly(guide: Guide, tokenizer: LLTokenizer) -> LLMatcher:
        while not is_over.is_set():
            sum(range(1000))
        return compile_guide(guide, tokenizer)

    monkeypatch.setattr(child, "compile_guide", compile_slowly)
    tokens = load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))
    server = child.GrammarServer(tokens, limit_s=0.05)
    states, _ = server.masks([opened(row, "regex", text) for row, text in enumerate("abc")])
    while states[:2] != [OVERRUN, OVERRUN]:
        states, _ = server.masks([{"row": row, "is_sampled": True, "tokens": []} for row in range(3)])
    assert states[2] == WAITING
    is_over.set()
    while {WAITING, OVERRUN} & set(states):
        states, _ = server.masks([{"row": row, "is_sampled": True, "tokens": []} for row in range(3)])
    assert states == [READY] * 3


def test_unique_guides_keep_the_cache_bounded(server: child.GrammarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_COMPILED", 20)
    for number in range(300):
        server.masks([opened(number % 8, "json_schema", json.dumps({"const": number}))])
    assert server.num_compiled <= 20 + 4
