"""Random settings: accepted requests end correctly, other requests are rejected at once with the reason, and no request
stalls.

Some combinations have a journal, of any kind; in these, the scheduler is lost once and recovers from the journal.

The fake model checks each step against the contents of its KV cache, and the harness checks that each token is the
successor of the previous one. A failing seed is printed and can be run alone: pytest
tests/scheduler/test_settings_fuzz.py --first-seed 123 --combinations 1
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from midstream.clock import SteadyClock
from midstream.config import SchedulerConfig
from protos import generation_pb2 as pb
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import Effect
from scheduler.core.events import Event, Submitted
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.request import FinishReason
from scheduler.core.request_spec import RetentionRange
from scheduler.journal import is_entry
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.postgres import PostgresStore
from scheduler.journal.store import Store
from scheduler.journal.threaded import ThreadedJournal
from scheduler.journal.writer import RowWriter
from scheduler.service import check, core_config
from scheduler.wire.requests import spec_from_proto
from tests.integration.postgres import is_installed, postgres_server
from tests.scheduler.fake_group import FakeGroup
from tests.scheduler.harness import LIMITS, MS, Harness
from tests.scheduler.running_scheduler import MODEL

CLOCK = SteadyClock()
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
        sink_token_length=draw.choice([size for size in (0, 1, 5, 20) if size < max(window, 1)]),
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
    tokens_per_block = config.tokens_per_block * draw.choice((1, 1, 2, 4))
    return {
        "tokens_per_block": tokens_per_block,
        "num_blocks": max(1, draw.choice((30, 60, 90, 90, 200)) // tokens_per_block),
        "max_batch_size": draw.choice((1, 4, 8, 8)),
        "max_num_tokens": draw.choice((1, 5, 13, 64) if config.enable_chunked_context else (25, 60, 256)),
        "max_sequence_length": draw.choice((40, 200, 200)),
        "attention_windows": windows,
        "kv_store": draw.choice(("", "shared")),
        "has_tiers": draw.random() < 0.5,
        "block_bytes": draw.choice((0, 1 << 20, 32 << 20)),
        "num_micro_batches": draw.choice((1, 1, 2, 3)),
    }


def draw_journal(draw: random.Random, folder: Path, server: str) -> Store | None:
    """Return an empty journal of a random kind, or None; `server` is the connection string of a PostgreSQL server, or
    empty.
    """
    kind = draw.choice(("off",) * 7 + ("log", "log", "postgres" if server else "log"))
    name = folder / f"journal{draw.getrandbits(63)}"
    if kind == "log":
        return LogStore(LogFolder(name))
    if kind == "postgres":
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name.name}".encode())
        return PostgresStore(f"{server} options='-c search_path={name.name}'", "a scheduler")
    return None


class Journaled(Harness):
    """A core that writes to a journal, and can be replaced by one that recovers from it."""

    def __init__(self, journal: Store | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.journal = journal
        self._writer: RowWriter | None = None
        if journal is not None:
            self._open(journal)

    def _open(self, journal: Store) -> None:
        contents, self._writer = ThreadedJournal(journal, LIMITS, "", CLOCK)._open()
        self.config = replace(self.config, scheduler_epoch=contents.scheduler_epoch)
        self.core = SchedulerCore(self.config, self.scheduler)
        for request in contents.requests:
            self.handle(replace(request, time_ns=self.now_ns))
        self._writer.know(self.core.lifecycle.requests.values())

    def handle(self, event: Event) -> list[Effect]:
        effects = super().handle(event)
        entries = [effect for effect in effects if is_entry(effect)]
        if self.journal is not None and self._writer is not None and entries:
            transaction = self._writer.transaction(entries)
            transaction.rewritten = self._writer.rows(self.journal.stale(self._writer.live_bytes))
            self.journal.write(transaction)
        return effects

    def lose_scheduler(self) -> dict[str, FakeGroup]:
        """Recover from the journal; return the groups, which must register again."""
        assert self.journal is not None
        groups, self.groups = self.groups, {}
        self.journal.close()
        self._open(self.journal)
        return groups


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


def request_of(request_id: str, spec: dict[str, Any]) -> pb.GenerateRequest:
    """Return the message for a request with these randomly drawn fields."""
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(values=spec["prompt"]),
        max_tokens=spec["max_tokens"],
        sampling=pb.SamplingConfig(
            num_return_sequences=spec.get("num_sequences", 1), beam_width=spec.get("beam_width", 1)
        ),
        speculative=pb.SpeculativeConfig(num_draft_tokens=spec.get("num_draft_tokens", 0)),
        stopping=pb.StoppingConfig(ignore_eos=True),
        output=pb.OutputConfig(prompt_log_probs=None if spec["is_cacheable"] else 0),
        priority=spec["priority"],
        client_id=spec["client_id"],
        cache_salt=spec["cache_salt"],
        detached=spec["is_detached"],
        kv_retention=pb.KvRetentionConfig(
            token_ranges=[
                pb.KvRetentionConfig.TokenRange(
                    start=item.start,
                    end=item.end,
                    priority=item.priority,
                    duration_ms=None if item.duration_ns is None else item.duration_ns // MS,
                )
                for item in spec.get("retention", ())
            ]
        ),
    )


class Run:
    """One combination of settings, and a few different requests."""

    def __init__(self, seed: int, folder: Path, server: str) -> None:
        self.draw = draw = random.Random(seed)
        self.config = draw_config(draw)
        check(self.config)
        settings = asdict(core_config(self.config, MODEL, 7))
        self.harness = Journaled(
            draw_journal(random.Random(-seed), folder, server),
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
        message = request_of(request_id, spec)
        self.harness.handle(Submitted(self.harness.now_ns, spec_from_proto(message, LIMITS, self.harness.now_ns)))
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

    def lose_scheduler(self) -> None:
        for name, group in self.harness.lose_scheduler().items():
            self.harness.add_group(name, after=group, **self.groups[name])
        self.harness.turn()

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
        for count in range(5000):
            self.step()
            if count == 10 and self.harness.journal is not None:
                self.lose_scheduler()
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


@pytest.fixture
def server() -> Iterator[str]:
    """Return the connection string of a PostgreSQL server; empty if PostgreSQL is not installed."""
    if not is_installed():
        yield ""
        return
    with postgres_server() as conninfo:
        yield conninfo


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in /dev/shm if that exists, because waiting for a disk would take most of the time."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_every_request_ends_or_is_refused_under_any_settings(
    request: pytest.FixtureRequest, memory: Path, server: str
) -> None:
    first = request.config.getoption("--first-seed")
    for seed in range(first, first + request.config.getoption("--combinations")):
        try:
            run = Run(seed, memory, server)
            run.run()
            if run.harness.journal is not None:
                run.harness.journal.close()
        except BaseException:
            print(f"pytest tests/scheduler/test_settings_fuzz.py --first-seed {seed} --combinations 1")
            raise
