"""Random settings on real tiny models: accepted requests get the tokens of transformers, and no request stalls.

The settings include KV tiers, and workers of both roles with either block transport.

To run one failing seed: pytest tests/gpu_worker/test_settings_fuzz.py -k 'settings[12]'. Set TEST_COMBINATIONS to
run more combinations.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from midstream.config import SchedulerConfig
from protos import generation_pb2 as pb
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.effects import Refused
from scheduler.core.events import Submitted
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.service import check
from scheduler.wire.requests import spec_from_proto
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.greedy import wrong_tokens
from tests.gpu_worker.tiny_models import SHAPE, make_runner, make_tiny_model

NUM_COMBINATIONS, NARROW = int(os.environ.get("TEST_COMBINATIONS", "32")), 8
# The family and the settings of each model, and the `max_attention_window` of the worker.
MODELS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("Llama", {}, 0),
    ("Llama", {}, NARROW),
    ("Mistral", {"sliding_window": 16}, 0),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 0),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that creates transformers' model with the window, and a folder whose config.json lacks the
    window.
    """

    @cache
    def make(number: int) -> tuple[Any, Path]:
        family, settings, narrow = MODELS[number]
        folder = tmp_path_factory.mktemp(family)
        model: Any = make_tiny_model(folder, family, **settings)
        if narrow:  # Mistral is Llama with an attention window
            config = transformers.MistralConfig(**SHAPE, sliding_window=narrow)
            narrowed = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            narrowed.load_state_dict(model.state_dict())
            model = narrowed
        return model, folder

    return make


def draw_request(draw: random.Random, number: int, prefix: list[int]) -> pb.GenerateRequest:
    tokens = prefix[: draw.choice((0, 17, 33))] + [draw.randrange(3, 331) for _ in range(draw.choice((1, 7, 25)))]
    request = pb.GenerateRequest(
        request_id=f"r{number}",
        token_ids=pb.TokenIds(values=tokens),
        max_tokens=draw.choice((1, 9, 24)),
        sampling=pb.SamplingConfig(temperature=0, num_return_sequences=draw.choice((1, 1, 2))),
        client_id=draw.choice(("a", "b")),
        priority=draw.choice((0, 0, 1)),
    )
    if draw.random() < 0.3:
        request.speculative.num_draft_tokens = draw.choice((1, 4))
    return request


def draw_places(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Draw settings for shared memory and tiers, with space for no block, a few blocks, or all blocks."""
    places: dict[str, Any] = {}
    size = draw.choice((1 << 10, 1 << 17, 1 << 24))
    if draw.random() < 0.5:
        places |= {"shared_kv_folder": str(folder / "shared"), "host_kv_bytes": draw.choice((0, size))}
    if draw.random() < 0.4:
        places |= {"disk_kv_folder": str(folder / "disk"), "disk_kv_bytes": size}
    return places


def run_with_losses(system: CoreWithRunners, draw: random.Random, num_workers: int, *, has_journal: bool) -> None:
    """Run all steps; at random times, lose a worker and, if there is a journal, the scheduler."""
    lost_after = draw.choice((0, 5, 20))
    for count in range(1, 3000):
        if not system.step():
            break
        if count == lost_after:
            system.lose_worker(draw.randrange(num_workers))
        elif count == 2 * lost_after + 3 and has_journal:
            system.lose_scheduler()


@pytest.mark.parametrize("seed", range(NUM_COMBINATIONS))
def test_requests_end_with_the_right_tokens_under_any_settings(
    models: Any, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    draw = random.Random(seed)
    number = seed % len(MODELS)
    chunked = draw.random() < 0.6
    config = SchedulerConfig(
        capacity_policy=draw.choice(sorted(CAPACITY_SCHEDULERS)),
        batching_type=draw.choice(sorted(MICRO_BATCH_SCHEDULERS)),
        tokens_per_block=draw.choice((4, 16, 32)),
        max_batch_size=draw.choice((2, 64)),
        max_num_tokens=draw.choice((7, 30, 2048) if chunked else (40, 2048)),
        max_context_chunk=draw.choice((0, 5, 16)) if chunked else 0,
        max_attention_window=MODELS[number][2],
        enable_block_reuse=draw.random() < 0.7,
        enable_chunked_context=chunked,
        pipeline_depth=draw.choice((1, 2, 3)),
        journal=random.Random(-seed).choice(("off", "log")),
    )
    check(config)
    model, folder = models(number)
    num_rows = draw.choice((2, 8))
    settings = {
        "kv": "f32",
        "tokens_per_block": config.tokens_per_block,
        "max_kv_tokens": draw.choice((96, 192, 960)),
        "max_batch_size": num_rows,
        "max_num_tokens": draw.choice((9, 64) if chunked else (36, 256)),
        "max_attention_window": config.max_attention_window,
        **draw_places(draw, tmp_path),
    }
    roles = draw.choice((("both",), ("prefill", "decode")))
    runner, *others = (make_runner(folder, role=role, **settings) for role in roles)
    for item in (runner, *others):
        request.addfinalizer(item.close)
    names = ("max_context_chunk", "max_attention_window", "enable_block_reuse", "enable_chunked_context")
    system = CoreWithRunners(
        runner,
        (),
        others=others,
        capacity=config.capacity_policy,
        batching=config.batching_type,
        max_batch_size=min(config.max_batch_size, num_rows),
        max_num_tokens=min(config.max_num_tokens, runner.max_num_tokens),
        pipeline_depth=config.pipeline_depth,
        journal=tmp_path / "journal" if config.journal != "off" else None,
        **{name: getattr(config, name) for name in names},
    )
    prefix = [draw.randrange(3, 331) for _ in range(33)]
    requests = [draw_request(draw, i, prefix) for i in range(7)]
    num_ended = 0
    for message in requests:
        effects = system.handle(Submitted(1, spec_from_proto(message, system.limits, 1)))
        refused = [effect.failure.message for effect in effects if isinstance(effect, Refused)]
        assert all(refused)
    run_with_losses(system, draw, len(roles), has_journal=config.journal != "off")
    for message in requests:
        made = system.core.lifecycle.requests.get(message.request_id)
        if made is None:
            continue
        assert made.times.finished_ns, f"{message.request_id} stalled"
        if made.failure is not None:
            assert made.failure.field in ("token_ids", "max_tokens", "sampling.num_return_sequences"), made.failure
            continue
        for output in outputs(made):
            assert len(output) == message.max_tokens
            assert wrong_tokens(model, list(message.token_ids.values), output) == []
        num_ended += 1
    assert num_ended, "all requests were rejected: draw other settings"
