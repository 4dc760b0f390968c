"""Workloads for benchmarks: prompts of random token ids, with greedy decoding that ignores end-of-sequence tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

FIRST_TOKEN_ID = 300
LAST_TOKEN_ID = 48_999


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send.

    Attributes:
        max_tokens: Exact number of tokens to generate.
    """

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests, and how many of them run concurrently.

    Attributes:
        counts_input: Whether throughput counts prompt tokens instead of output tokens.
    """

    name: str
    requests: tuple[BenchRequest, ...]
    concurrency: int
    counts_input: bool = False

    def within(self, vocab_size: int) -> Workload:
        """Return the workload with its token ids mapped into a vocabulary of this size."""
        if vocab_size > LAST_TOKEN_ID:
            return self
        first = min(FIRST_TOKEN_ID, vocab_size // 2)  # the first ids are often special tokens
        requests = tuple(
            replace(item, token_ids=tuple(first + token_id % (vocab_size - first) for token_id in item.token_ids))
            for item in self.requests
        )
        return replace(self, requests=requests)


def _tokens(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count))


def single(generator: random.Random) -> Workload:
    """Return one request with 128 prompt tokens and 128 output tokens."""
    return Workload("single", (BenchRequest(_tokens(generator, 128), 128),), 1)


def mixed(generator: random.Random) -> Workload:
    """Return 64 concurrent requests with 32 to 256 prompt tokens and 128 output tokens."""
    requests = tuple(BenchRequest(_tokens(generator, generator.randint(32, 256)), 128) for _ in range(64))
    return Workload("mixed", requests, 64)


def prefix(generator: random.Random) -> Workload:
    """Return 64 concurrent requests with a shared prefix of 512 tokens, 32 own prompt tokens and 32 output tokens."""
    shared = _tokens(generator, 512)
    return Workload("prefix", tuple(BenchRequest(shared + _tokens(generator, 32), 32) for _ in range(64)), 64)


def prefill(generator: random.Random) -> Workload:
    """Return 16 requests with 1,024 prompt tokens and one output token."""
    return Workload("prefill", tuple(BenchRequest(_tokens(generator, 1024), 1) for _ in range(16)), 16, True)


def chat(generator: random.Random) -> Workload:
    """Return 96 requests with log-normal lengths, 64 of them concurrent."""
    return Workload("chat", tuple(chat_request(generator) for _ in range(96)), 64)


def chat_request(generator: random.Random) -> BenchRequest:
    prompt = _tokens(generator, _log_normal(generator, 4.8, 0.9, 8, 1024))
    return BenchRequest(prompt, _log_normal(generator, 4.4, 0.8, 4, 256))


def uniform(
    generator: random.Random, count: int, num_prompt_tokens: int, max_tokens: int, concurrency: int
) -> Workload:
    """Return `count` requests of the same size."""
    requests = tuple(BenchRequest(_tokens(generator, num_prompt_tokens), max_tokens) for _ in range(count))
    return Workload(f"uniform-{num_prompt_tokens}-{max_tokens}", requests, concurrency)


def _log_normal(generator: random.Random, mean: float, deviation: float, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(generator.gauss(mean, deviation)))))


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    "single": single,
    "mixed": mixed,
    "prefix": prefix,
    "prefill": prefill,
    "chat": chat,
}
