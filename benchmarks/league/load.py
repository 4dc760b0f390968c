"""One row: concurrent requests of every kind, the faults, and the results of the clients.

Midstream is called through its own client, which resumes a stream at another router. The other systems are called
through the official OpenAI client, which retries calls that got no response; a broken stream is lost, since their APIs
cannot resume it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import openai
from openai import AsyncOpenAI

from midstream.client import AsyncClient, Guide, SamplingParams
from midstream.errors import MidstreamError

KINDS = ("plain", "n=3", "guided")
# A stream without output for this long counts as lost.
SILENCE_S = 90.0
_REGEX = r"[a-z ]{150,400}"


@dataclass(frozen=True)
class Request:
    """One greedy or seeded request of a given kind."""

    number: int
    kind: str
    prompt: str
    max_tokens: int

    @property
    def temperature(self) -> float:
        """Return the temperature; three samples of a greedy request would be identical."""
        return 0.8 if self.kind == "n=3" else 0.0


@dataclass
class Outcome:
    """The result of a client: the text of each output, arrival times, and the error."""

    texts: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    error: str = ""


# The index of the output, and its new text.
Stream = Callable[[Request], AsyncIterator[tuple[int, str]]]


def make_requests(count: int, max_tokens: int) -> list[Request]:
    """Return requests: half of them are plain, a quarter have three outputs, and a quarter are guided."""
    kinds = ("plain", "n=3", "plain", "guided")
    return [
        Request(number, kinds[number % 4], f"Chapter {number + 1}. Once upon a time there were", max_tokens)
        for number in range(count)
    ]


async def run_requests(
    stream: Stream,
    requests: Sequence[Request],
    at_once: int,
    fault: Callable[[], None] | None = None,
    num_faults: int = 1,
) -> list[Outcome]:
    """Send the requests, `at_once` at a time; inject the fault at evenly spaced numbers of ended requests."""
    outcomes = [Outcome() for _ in requests]
    remaining, num_ended = iter(list(zip(requests, outcomes, strict=True))), 0

    async def ask_remaining() -> None:
        nonlocal num_ended
        for request, outcome in remaining:
            await _ask(stream, request, outcome)
            num_ended += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(ask_remaining())
        for number, inject in enumerate([fault] * num_faults if fault is not None else []):
            while num_ended < len(requests) * (2 * number + 1) // (2 * num_faults):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.to_thread(inject)
    return outcomes


async def _ask(stream: Stream, request: Request, outcome: Outcome) -> None:
    chunks = stream(request)
    try:
        while True:
            async with asyncio.timeout(SILENCE_S):
                index, text = await anext(chunks)
            outcome.texts[index] = outcome.texts.get(index, "") + text
            outcome.arrivals.append(time.monotonic())
    except StopAsyncIteration:
        pass
    except TimeoutError:
        outcome.error = f"no output for {SILENCE_S:.0f} s"
    except (MidstreamError, openai.OpenAIError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"


def own_stream(client: AsyncClient) -> Stream:
    """Call Midstream through its own client."""

    async def stream(request: Request) -> AsyncIterator[tuple[int, str]]:
        sampling = SamplingParams(
            temperature=request.temperature,
            seed=request.number,
            max_tokens=request.max_tokens,
            ignore_eos=request.kind != "guided",
            num_return_sequences=3 if request.kind == "n=3" else 1,
        )
        guide = Guide(regex=_REGEX) if request.kind == "guided" else None
        async for chunk in client.generate(request.prompt, sampling=sampling, guided=guide):
            yield chunk.sequence_index, chunk.text

    return stream


def openai_stream(client: AsyncOpenAI, guide: Callable[[str], dict[str, object]]) -> Stream:
    """Call a server through its OpenAI API; `guide` returns its fields for a regular expression."""

    async def stream(request: Request) -> AsyncIterator[tuple[int, str]]:
        is_guided = request.kind == "guided"
        chunks = await client.completions.create(
            model="model",
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.number,
            n=3 if request.kind == "n=3" else 1,
            stream=True,
            extra_body=guide(_REGEX) if is_guided else {"ignore_eos": True},
        )
        ended = set()
        async for chunk in chunks:
            for choice in chunk.choices:
                if choice.text:
                    yield choice.index, choice.text
                if choice.finish_reason:
                    ended.add(choice.index)
        if len(ended) < (3 if request.kind == "n=3" else 1):
            raise ValueError("the stream ended early")

    return stream
