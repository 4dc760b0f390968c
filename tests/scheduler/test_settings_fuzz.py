"""Random settings: accepted requests end correctly, others are rejected at once with the reason, and no request stalls.

The fake model checks each step against the contents of its KV cache, and the harness checks that each token is the
successor of the previous one. A failing seed is printed and can be run alone: pytest
tests/scheduler/test_settings_fuzz.py --first-seed 123 --combinations 1
"""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest

from midstream.config import SchedulerConfig
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.request import FinishReason
from scheduler.core.request_spec import RetentionRange
from scheduler.service import check, core_config
from tests.scheduler.cell import MODEL
from tests.scheduler.harness import MS, Harness

PREFIX = list(range(7, 47))
# Errors that an accepted request may end with if no worker is large enough.
TOO_LARGE = ("at most", "does not fit", "tokens of KV cache", "large enough in every respect")


def draw_config(draw: random.Random) -> SchedulerConfig:
    chunked = draw.random() < 0.6
    window = draw.choice((0, 0, 0, 3, 8))
    return SchedulerConfig(
        capacity_policy=draw.choice(sorted(CAPACITY_SCHEDULERS)),
        batching_type=draw.choice(sorted(MICRO_BATCH_SCHEDULERS)),
        tokens_per_block=draw.choice((1, 2, 4, 4, 16)),
        max_batch_size=draw.choice((1, 4, 64, 64)),
        max_num_tokens=draw.choice((1, 5, 13, 64) if chunked else (25, 60, 2048)),
        max_context_chunk=draw.choice((0, 0, 1, 3, 8, 50)) if chunked else 0,
        max_attention_window=window,
        sink_token_length=draw.choice((0, 1, 5, 20)) if window else 0,
        enable_block_reuse=draw.random() < 0.7,
        enable_chunked_context=chunked,
        pipeline_depth=draw.choice((1, 2, 2, 4)),
        max_queue_size=draw.choice((2, 100, 100, 100)),
        max_worker_deaths=100,
    )


def draw_group(draw: random.Random, config: SchedulerConfig) -> dict[str, Any]:
    limit = config.max_attention_window
    windows: tuple[int, ...] = draw.choice(((), (), (0, 6), (0, 6), (5, 9), (6,), (16, 3, 16), (1,)))
    if limit:
        windows = tuple(min(window or limit, limit) for window in windows or (0,))
    return {
        "num_blocks": max(1, draw.choice((30, 60, 90, 90, 200)) // config.tokens_per_block),
        "max_batch_size": draw.choice((1, 4, 8, 8)),
        "max_num_tokens": draw.choice((1, 5, 13, 64) if config.enable_chunked_context else (25, 60, 256)),
        "max_sequence_length": draw.choice((40, 200, 200)),
        "attention_windows": windows,
        "kv_store": draw.choice(("", "shared")),
        "has_tiers": draw.random() < 0.5,
        "block_bytes": draw.choice((0, 1 << 20, 32 << 20)),
        "num_micro_batches": draw.choice((1, 1, 2, 3)),
    }


def draw_request(draw: random.Random, number: int) -> dict[str, Any]:
    num_shared = draw.choice((0, 0, 4, 17, 30))
    own = [100 + number % 3 * 100 + index for index in range(draw.choice((1, 1, 3, 9, 20)))]
    spec: dict[str, Any] = {
        "prompt": PREFIX[:num_shared] + own,
        "max_tokens": draw.choice((1, 2, 7, 12, 30)),
        "priority": draw.choice((0, 0, 1)),
        "client_id": draw.choice(("", "a", "b")),
        "is_cacheable": draw.random() < 0.8,
        "cache_salt": draw.choice(("", "", "salt")),
        "is_detached": True,
    }
    kind = draw.random()
    if kind < 0.2:
        spec["num_sequences"] = draw.choice((2, 3, 6, 8))
    elif kind < 0.3:
        spec["beam_width"] = draw.choice((2, 3))
    elif kind < 0.5:
        spec["num_draft_tokens"] = draw.choice((1, 4))
    if draw.random() < 0.3:
        spec["retention"] = (RetentionRange(0, draw.choice((None, 8)), draw.choice((10, 90)), draw.choice((None, MS))),)
    return spec


class Run:
    """One combination of settings, and a few different requests."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.config = draw_config(draw)
        check(self.config)
        settings = asdict(core_config(self.config, MODEL, 7))
        self.harness = Harness(
            capacity=self.config.capacity_policy,
            batching=self.config.batching_type,
            **settings | {"max_sequence_length": 300, "vocab_size": 1000, "model_fingerprint": ""},
        )
        # Windows follow from the model and one setting, so all workers have the same windows.
        self.groups = {"g": draw_group(draw, self.config), "h": draw_group(draw, self.config)}
        self.groups["h"]["attention_windows"] = self.groups["g"]["attention_windows"]
        roles = draw.choice((("", ""), ("prefill", "decode"), ("decode", "prefill"), ("prefill", "both")))
        for (name, group), role in zip(self.groups.items(), roles, strict=True):
            group |= {"role": role, "kv_source": f"at {name}" if role == "prefill" else ""}
        self.max_tokens: dict[str, int] = {}

    def submit(self) -> None:
        request_id = f"r{len(self.max_tokens)}"
        spec = draw_request(self.draw, len(self.max_tokens))
        self.max_tokens[request_id] = spec["max_tokens"]
        self.harness.submit(request_id, **spec)
        if request_id in self.harness.refused:
            assert self.harness.refused[request_id].failure.message
        elif self.harness.core.groups and request_id not in self.harness.ended:
            # The request was accepted, so some worker must be able to run it.
            request = self.harness.core.lifecycle.requests[request_id]
            assert any(group.is_large_enough(request) for group in self.harness.core.groups)

    def step(self) -> None:
        fetching = [name for name, group in self.harness.groups.items() if group.fetches]
        if fetching and self.draw.random() < 0.5:
            self.harness.fetch(self.draw.choice(fetching), self.draw.choice((None, None, None, 0, 1)))
            return
        busy = [name for name, group in self.harness.groups.items() if group.plans]
        if not busy:
            self.harness.turn()
            return
        name = self.draw.choice(busy)
        batch = self.harness.groups[name].batches[0]
        num_context = sum(batch.context_lengths)
        self.harness.finish_step(name)
        num_generation = len(self.harness.groups[name].model.generating)
        limit = min(self.groups[name]["max_num_tokens"], self.config.max_num_tokens)
        assert num_context + num_generation + sum(batch.draft_limits) <= limit
        self.harness.turn()
        self.harness.check()

    def somebody_comes_or_dies(self) -> None:
        name = self.draw.choice("gh")
        if name not in self.harness.groups:
            self.harness.add_group(name, **self.groups[name])
        elif self.draw.random() < 0.5:
            self.harness.cut(name)
        else:
            self.harness.leave(name)

    def run(self) -> None:
        self.harness.add_group("g", **self.groups["g"])
        for _ in range(self.draw.randint(5, 12)):
            self.submit()
            for _ in range(self.draw.choice((0, 0, 0, 1, 5))):
                self.step()
            if self.draw.random() < 0.1:
                self.somebody_comes_or_dies()
        for name in self.groups:
            if name not in self.harness.groups:
                self.harness.add_group(name, **self.groups[name])
        for _ in range(5000):
            self.step()
            is_busy = any(group.plans or group.fetches for group in self.harness.groups.values())
            if not is_busy and not self.harness.wait_for_groups():
                break
        self.check()

    def check(self) -> None:
        harness = self.harness
        unfinished = set(harness.accepted) - set(harness.ended)
        assert not unfinished, f"{unfinished} stalled"
        harness.check_is_empty()
        assert set(harness.ended) | set(harness.refused) == set(self.max_tokens)
        for request_id, reason in harness.ended.items():
            request = harness.core.lifecycle.requests[request_id]
            if request.failure is not None:
                assert any(words in request.failure.message for words in TOO_LARGE), request.failure
                continue
            assert reason is FinishReason.LENGTH
            for sequence in request.sequences:
                assert len(harness.tokens[request_id, sequence.index]) == self.max_tokens[request_id]


def test_every_request_ends_or_is_refused_under_any_settings(request: pytest.FixtureRequest) -> None:
    first = request.config.getoption("--first-seed")
    for seed in range(first, first + request.config.getoption("--combinations")):
        try:
            Run(seed).run()
        except BaseException:
            print(f"pytest tests/scheduler/test_settings_fuzz.py --first-seed {seed} --combinations 1")
            raise
