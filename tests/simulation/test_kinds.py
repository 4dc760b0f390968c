"""Workers of several kinds and services with several tokenizers in one cell, while all of them are killed.

Each request has the tokens of one kind, except after the offset that its stream reports, and the text of one tokenizer.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from midstream.chunk import Chunk
from tests.simulation.__main__ import describe
from tests.simulation.cluster import Shape
from tests.simulation.model import extend_state, next_token, vocabulary
from tests.simulation.run import run_seed
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import Scenario
from tests.simulation.workload import Job, long_request

KINDS = (0, 7)
TOKENIZERS = ("", "other")
NUM_SEEDS = 40


@dataclass
class KindJob(Job):
    """A request of one sequence whose output may be of any kind and tokenizer, but only of one of each.

    Attributes:
        changed_at: The offset that the stream reported.
    """

    changed_at: int | None = None
    _states: dict[int, int] = field(default_factory=dict)
    _differs_at: dict[int, int] = field(default_factory=dict)  # by kind: the first token that is not of it
    _is_foreign: bool = False  # whether a token is of no kind
    _num_noted: int = 0

    def add(self, chunk: Chunk) -> None:
        tokens, say = self.tokens[0], self.problems.append
        if chunk.token_offset != len(tokens):
            say(f"it continues at token {chunk.token_offset}, but {len(tokens)} tokens were received")
        tokens.extend(chunk.token_ids)
        self._note(chunk.token_ids)
        self.texts[0] += chunk.text
        if chunk.kind_changed_at is not None:
            self.changed_at = chunk.kind_changed_at
        num_own = len(tokens) if self.changed_at is None else self.changed_at
        is_own = any(self._differs_at.get(kind, num_own) >= num_own for kind in KINDS)
        if self._is_foreign or not is_own:
            say(f"the first {num_own} of {tokens} are of no single kind")
        if not any(vocabulary(item).text(tokens).startswith(self.texts[0]) for item in TOKENIZERS):
            say(f"the text {self.texts[0]!r} of {tokens} is of no single tokenizer")
        if chunk.is_final:
            self.final = chunk

    def _note(self, token_ids: Sequence[int]) -> None:
        """Compare new tokens with those of each kind, given all tokens before them."""
        if not self._states:
            prompt = self.request.token_ids.values
            self._states = {kind: functools.reduce(extend_state, prompt, kind) for kind in KINDS}
        for token in token_ids:
            wrong = {kind for kind, state in self._states.items() if next_token(state, self._seed, 0) != token}
            for kind in wrong:
                self._differs_at.setdefault(kind, self._num_noted)
            self._is_foreign |= len(wrong) == len(KINDS)
            self._states = {kind: extend_state(state, token) for kind, state in self._states.items()}
            self._num_noted += 1

    @property
    def _seed(self) -> int:
        return self.request.sampling.seed

    def check_complete(self) -> None:
        if self.final is None or len(self.tokens[0]) != self.request.max_tokens:
            self.problems.append(f"it ended after {len(self.tokens[0])} of {self.request.max_tokens} tokens")
        elif self.texts[0] not in [vocabulary(item).text(self.tokens[0]) for item in TOKENIZERS]:
            self.problems.append(f"its text is {self.texts[0]!r}")
        elif self.final.kind_changed_at != self.changed_at:
            self.problems.append("the final chunk does not repeat the change of kind")


def mixed(dice: random.Random) -> Scenario:
    """Kill parts and restart them with another kind or tokenizer."""
    work: list[Job] = [
        KindJob(long_request(dice, number, dice.randint(3, 30), dice.randint(20, 90)), start_s=dice.uniform(0, 1.0))
        for number in range(6)
    ]
    shape = Shape(
        num_workers=3,
        num_detokenizers=3,
        num_routers=2,
        step_s=0.02,
        kinds={"worker-1": KINDS[1]},
        scheduler={"no_worker_timeout_s": dice.choice((0.5, 3.0)), "lost_kind": "move"},
    )

    async def inject(simulation: RunningSimulation) -> None:
        tokenizers = simulation.cluster.network.tokenizers
        for _ in range(simulation.dice.randint(3, 8)):
            await simulation.sleep(0.05, 0.4)
            name = simulation.dice.choice(
                ("worker-0", "worker-1", "worker-2", "worker-2", "scheduler", "router-0", "router-1", "detokenizer-0")
            )
            simulation.kill(name)
            if name.startswith("worker"):
                shape.kinds[name] = simulation.dice.choice(KINDS)
            elif name != "scheduler":
                tokenizers[name] = simulation.dice.choice(TOKENIZERS)
            await simulation.restart(name, 0.05, 0.6)
        if simulation.dice.random() < 0.6:  # a rollout without workers of the old kind
            kind = simulation.dice.choice(KINDS)
            for name in ("worker-0", "worker-1", "worker-2"):
                simulation.kill(name)
                shape.kinds[name] = kind
                await simulation.restart(name, 0.01, 0.05)

    def judge(simulation: RunningSimulation) -> None:
        jobs = [job for job in simulation.jobs if isinstance(job, KindJob)]
        simulation.happened["changed kind"] += sum(job.changed_at is not None for job in jobs)
        simulation.happened["kept kind"] += sum(job.changed_at is None for job in jobs)
        for tokenizer in TOKENIZERS:
            texts = [vocabulary(tokenizer).text(job.tokens[0]) for job in jobs]
            simulation.happened[f"text {tokenizer}"] += sum(
                job.texts[0] == text for job, text in zip(jobs, texts, strict=True)
            )

    return Scenario("mixed kinds", shape, work, inject, judge)


def with_tokenizers(dice: random.Random) -> Scenario:
    """Return the scenario, whose second router and detokenizers have another tokenizer from the beginning."""
    scenario = mixed(dice)
    scenario.tokenizers = {"router-1": TOKENIZERS[1], "detokenizer-1": TOKENIZERS[1]}
    return scenario


def test_requests_keep_their_kind_and_tokenizer_over_kills() -> None:
    happened = Counter[str]()
    outcomes = [run_seed(seed, make=with_tokenizers) for seed in range(NUM_SEEDS)]
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, "\n".join(map(describe, failed))
    for outcome in outcomes:
        happened.update(outcome.happened)
    for name in ("changed kind", "kept kind", "text ", "text other"):
        assert happened[name] > NUM_SEEDS / 4, happened


@pytest.mark.parametrize("seed", [3, 4])
def test_it_replays_event_for_event(seed: int) -> None:
    first, second = (run_seed(seed, make=with_tokenizers, trace=True) for _ in range(2))
    assert first.trace == second.trace
