"""Requests, their expected results, and the clients that send them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from midstream.chunk import Chunk, FinishReason
from midstream.client import AsyncClient
from midstream.errors import MidstreamError
from protos import generation_pb2 as pb
from tests.simulation.model import (
    END_ID,
    FIRST_PLAIN_ID,
    POISON_ID,
    VOCAB_SIZE,
    extend_state,
    log_prob,
    next_token,
    vocabulary,
)


@dataclass(frozen=True, slots=True)
class Expected:
    """The output of a fault-free run for one sequence."""

    token_ids: list[int]
    text: str
    reason: FinishReason
    matched_stop: str | int | None = None


def expected(request: pb.GenerateRequest) -> list[Expected]:
    """Compute the output of a fault-free run directly; a test compares it with the output of the system."""
    return [_sequence(request, index) for index in range(max(request.sampling.num_return_sequences, 1))]


def _sequence(request: pb.GenerateRequest, index: int) -> Expected:
    state = 0
    for token in request.token_ids.values:
        state = extend_state(state, token)
    ends = set() if request.stopping.ignore_eos else {END_ID}
    tokens: list[int] = []
    words = list(request.stopping.stop_words)
    decode = vocabulary().text
    while len(tokens) < request.max_tokens:
        token = next_token(state, request.sampling.seed, index)
        if token in ends and len(tokens) < request.sampling.min_tokens:
            token = FIRST_PLAIN_ID
        state = extend_state(state, token)
        tokens.append(token)
        for word in words:
            if word in (text := decode(tokens)):
                return Expected(tokens, text[: text.index(word)], FinishReason.STOP, word)
        if token in ends:
            return Expected(tokens, decode(tokens), FinishReason.STOP, token)
    return Expected(tokens, decode(tokens), FinishReason.LENGTH)


@dataclass
class Job:
    """A request, the behavior of its client, and the result.

    Attributes:
        start_s: Time at which the request is sent.
        timeout_s: Timeout of the request.
        leaves_after: The client disconnects after this many tokens; None means never.
        leaves_at_s: Time at which the client disconnects.
        pause_s: Pause between chunks.
        watch: Called with each chunk.
        problems: Descriptions of the violations.
    """

    request: pb.GenerateRequest
    start_s: float = 0.0
    timeout_s: float | None = None
    leaves_after: int | None = None
    leaves_at_s: float | None = None
    pause_s: float = 0.0
    must_complete: bool = True
    watch: Callable[[Job], None] = lambda _: None
    error: MidstreamError | None = None
    has_left: bool = False
    is_done: bool = False
    ended_s: float = 0.0
    num_resumes: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    ends: dict[int, Chunk] = field(default_factory=dict)
    final: Chunk | None = None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = max(self.request.sampling.num_return_sequences, 1)
        self.expected = expected(self.request)
        self.tokens = [[] for _ in range(count)]
        self.texts = [""] * count
        self.log_probs = [[] for _ in range(count)]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens received."""
        return sum(map(len, self.tokens))

    def add(self, chunk: Chunk) -> None:
        """Add a received chunk."""
        index, say = chunk.sequence_index, self.problems.append
        if self.final is not None:
            say("a chunk was received after the final one")
        if index >= len(self.tokens):
            say(f"sequence {index} does not exist")
            return
        tokens = self.tokens[index]
        if index in self.ends and not chunk.is_final:
            say(f"sequence {index} continued after its end")
        if chunk.token_offset != len(tokens):
            say(f"sequence {index} continues at token {chunk.token_offset}, but {len(tokens)} tokens were received")
        tokens.extend(chunk.token_ids)
        self.texts[index] += chunk.text
        if chunk.extras is not None and chunk.extras.log_probs is not None:
            self.log_probs[index].extend(chunk.extras.log_probs.token_log_probs)
        wanted = self.expected[index]
        if tokens != wanted.token_ids[: len(tokens)]:
            say(f"sequence {index} has tokens {tokens}, expected a prefix of {wanted.token_ids}")
        self._check_text(index, wanted, is_cut=chunk.is_sequence_final and len(tokens) < len(wanted.token_ids))
        if chunk.is_sequence_final:
            self.ends[index] = chunk
        if chunk.is_final:
            self.final = chunk

    def _check_text(self, index: int, wanted: Expected, *, is_cut: bool) -> None:
        """Compare the text received so far with the expected text.

        If the output was cut off, its text includes the beginning of a stop word or of a character that had been held
        back.
        """
        text = self.texts[index]
        due = vocabulary().text(self.tokens[index]) if is_cut else wanted.text
        if not (text == due if is_cut else due.startswith(text)):
            self.problems.append(
                f"sequence {index} has text {text!r}, expected {'' if is_cut else 'a prefix of '}{due!r}"
            )

    def check_complete(self) -> None:
        """Compare the delivered output with that of a fault-free run."""
        say = self.problems.append
        if self.final is None or self.final.usage is None:
            say("it ended without a final chunk that contains the usage")
            return
        for index, wanted in enumerate(self.expected):
            end = self.ends.get(index)
            got = (self.tokens[index], self.texts[index], end and end.finish_reason, end and end.matched_stop)
            due = (wanted.token_ids, wanted.text, wanted.reason, wanted.matched_stop)
            if got != due:
                say(f"sequence {index} is {got}, expected {due}")
            if self.request.output.HasField("log_probs"):
                probs = [log_prob(token, position) for position, token in enumerate(wanted.token_ids)]
                if self.log_probs[index] != probs:
                    say(f"sequence {index} has log probs {self.log_probs[index]}, expected {probs}")
        due_count = sum(len(item.token_ids) for item in self.expected)
        if self.final.usage.completion_tokens != due_count:
            say(f"usage reports {self.final.usage.completion_tokens} tokens, expected {due_count}")

    async def run(self, client: AsyncClient) -> None:
        """Send the request and read its output."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.start_s)
        stream = client.stream(self.request, timeout_s=self.timeout_s)
        try:
            async with asyncio.timeout_at(self.leaves_at_s):
                async for chunk in stream:
                    self.add(chunk)
                    self.watch(self)
                    if self.leaves_after is not None and self.num_tokens >= self.leaves_after and not chunk.is_final:
                        self.has_left = True
                        stream.cancel()
                        break
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
        except MidstreamError as error:
            self.error = error
        except TimeoutError:
            self.has_left = True
        self.num_resumes = stream.num_resumes
        self.ended_s, self.is_done = loop.time(), True


STOP_WORDS = ("ab", "e ", "文", "dd", "a.")


def request(dice: random.Random, number: int, **fields: object) -> pb.GenerateRequest:
    """Return a random request of any kind."""
    result = pb.GenerateRequest(request_id=f"r{number}", streaming=dice.random() < 0.85)
    # Some prompts have a common prefix, so that they share blocks.
    head = [10 + number % 2] * 8 if dice.random() < 0.4 else []
    length = dice.choice((1, 3, 6, 12, 25))
    result.token_ids.values.extend(head + [dice.randrange(FIRST_PLAIN_ID, VOCAB_SIZE) for _ in range(length)])
    result.max_tokens = dice.randint(3, 14)
    result.sampling.seed = dice.getrandbits(32)
    kind = dice.random()
    if kind < 0.2:
        result.sampling.num_return_sequences = dice.randint(2, 3)
    elif kind < 0.45:
        result.stopping.stop_words.append(dice.choice(STOP_WORDS))
    elif kind < 0.6:
        result.output.log_probs = 1
    if dice.random() < 0.5:
        result.stopping.ignore_eos = True
    elif kind >= 0.45 and dice.random() < 0.3:
        result.sampling.min_tokens = dice.randint(1, 6)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def long_request(dice: random.Random, number: int, prompt: int, max_tokens: int) -> pb.GenerateRequest:
    """Return a request with the given lengths that ignores EOS, so that it generates `max_tokens` tokens."""
    result = pb.GenerateRequest(request_id=f"r{number}", max_tokens=max_tokens)
    result.token_ids.values.extend(dice.randrange(FIRST_PLAIN_ID, VOCAB_SIZE) for _ in range(prompt))
    result.sampling.seed = dice.getrandbits(32)
    result.stopping.ignore_eos = True
    return result


def poison(result: pb.GenerateRequest) -> pb.GenerateRequest:
    """Turn a request into one that crashes the workers that run it."""
    result.token_ids.values.append(POISON_ID)
    return result


def jobs(dice: random.Random, count: int, spread_s: float = 0.3) -> list[Job]:
    """Return several requests, sent at random times."""
    return [Job(request(dice, number), start_s=dice.uniform(0, spread_s)) for number in range(count)]


def ids(items: Sequence[Job]) -> set[str]:
    """Return the ids of the requests."""
    return {item.request.request_id for item in items}
