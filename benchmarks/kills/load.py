"""Requests with known results, and a record of their outcomes."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.errors import MidstreamError

DEADLINE_S = 200.0


@dataclass(frozen=True)
class Question:
    """A request. Questions alternate between greedy and seeded sampling."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass
class Ledger:
    """Outcomes of all requests.

    Attributes:
        num_started, num_complete, num_identical: Requests started, completed, and completed with the expected output.
        failures: Errors of the failed requests.
        arrivals: Times per stream (time.monotonic): zero before each request, its start, and each chunk with tokens.
    """

    num_started: int = 0
    num_complete: int = 0
    num_identical: int = 0
    num_resumes: int = 0
    failures: list[str] = field(default_factory=list)
    arrivals: dict[int, list[float]] = field(default_factory=dict)


def make_questions(count: int, num_tokens: int, *, prompt_tokens: tuple[int, int] = (32, 128)) -> list[Question]:
    """Return the questions, which are the same at each call."""
    rng = random.Random(64)
    questions = []
    for number in range(count):
        prompt = tuple(rng.randrange(300, 48_999) for _ in range(rng.randint(*prompt_tokens)))
        kind = {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.9, "repetition_penalty": 1.1}
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number, **kind)  # type: ignore[arg-type]
        questions.append(Question(prompt, sampling))
    return questions


async def ask(client: AsyncClient, question: Question, stream_number: int, ledger: Ledger) -> Result | None:
    """Run a request to completion; return None if it failed."""
    ledger.num_started += 1
    stream = client.generate(token_ids=question.token_ids, sampling=question.sampling, timeout_s=DEADLINE_S)
    result = Result(stream.request_id)
    arrivals = ledger.arrivals.setdefault(stream_number, [])
    arrivals += (0.0, time.monotonic())
    try:
        async for chunk in stream:
            result.add(chunk)
            if chunk.token_ids:
                arrivals.append(time.monotonic())
    except MidstreamError as error:
        ledger.failures.append(f"{type(error).__name__}: {error}")
        return None
    ledger.num_complete += 1
    ledger.num_resumes += stream.num_resumes
    return result


async def expectations(client: AsyncClient, questions: list[Question], at_once: int) -> list[Result]:
    """Return the outputs of the requests without kills.

    Raises:
        RuntimeError: A request failed.
    """
    ledger, gate = Ledger(), asyncio.Semaphore(at_once)

    async def one(question: Question) -> Result | None:
        async with gate:
            return await ask(client, question, 0, ledger)

    results = await asyncio.gather(*(one(question) for question in questions))
    if ledger.failures:
        raise RuntimeError(f"a request failed before any kill: {ledger.failures[0]}")
    return [result for result in results if result is not None]


async def stream_until(
    client: AsyncClient, questions: list[Question], expected: list[Result], is_over: Callable[[], bool], ledger: Ledger
) -> None:
    """Repeat each question in its own stream until `is_over` returns True; the last request of each stream is still
    completed.
    """

    async def one(number: int) -> None:
        while True:
            result = await ask(client, questions[number], number, ledger)
            ledger.num_identical += result is not None and is_identical(result, expected[number])
            if is_over():
                return

    await asyncio.gather(*(one(number) for number in range(len(questions))))


def is_identical(result: Result, expected: Result) -> bool:
    """Return whether the text and the tokens are equal."""
    return result.token_ids == expected.token_ids and result.text.encode() == expected.text.encode()


def longest_gap(arrivals: list[float], start: float, end: float) -> float | None:
    """Return the longest time without tokens in a stream between two times; None if the stream did not run then."""
    longest = None
    for before, after in itertools.pairwise(arrivals):
        if before and after and after > start and before < end:
            gap = after - max(before, start)
            longest = gap if longest is None else max(longest, gap)
    return longest
