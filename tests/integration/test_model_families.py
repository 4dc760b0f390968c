"""Tiny models of newer families through the service, while a worker is killed.

By default only the hybrid model runs; with TEST_EVERY_FAMILY=1 the others run too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from midstream.client import AsyncClient
from tests.gpu_worker.greedy import wrong_tokens
from tests.gpu_worker.test_families import MODELS
from tests.gpu_worker.tiny_models import SHAPE, make_tiny_model
from tests.integration.holding import NAME, Hold
from tests.integration.service import Service, eventually_idle, stub_of, tokens

IS_THOROUGH = bool(os.environ.get("TEST_EVERY_FAMILY"))
OTHERS = ("qwen2_moe", "deepseek_v3", "gpt_oss", "mamba2", "nemotron_h", "granite_hybrid")
NUM_REQUESTS, MAX_TOKENS = 6, 80


def make_model(folder: Path, name: str) -> Any:
    """Create a model whose tokenizer maps each token to a letter."""
    family, settings = MODELS[name]
    model = make_tiny_model(folder, family, **settings)
    tokenizer = Tokenizer(models.WordLevel(vocab={chr(0x4E00 + i): i for i in range(SHAPE["vocab_size"])}))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(name, marks=pytest.mark.skipif(not IS_THOROUGH, reason="slow")) for name in OTHERS)],
)
async def test_the_death_of_a_worker_changes_no_token(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", name)
    draw = random.Random(3)
    prefix = [draw.randrange(3, SHAPE["vocab_size"]) for _ in range(40)]
    prompts = [prefix + [draw.randrange(3, SHAPE["vocab_size"]) for _ in range(5 + i)] for i in range(NUM_REQUESTS)]
    (tmp_path / "hold").mkdir()
    hold = Hold(tmp_path / "hold")
    service = Service.start(tmp_path / "run", "--model", str(tmp_path / "model"), "--workers", "2", **hold.settings)
    try:
        async with AsyncClient(service.routers()) as client, stub_of(service.routers()[0]) as stub:

            async def run(prompt: list[int]) -> list[int]:
                result = await client.stream(tokens(prompt, max_tokens=MAX_TOKENS)).result()
                return list(result.sequences[0].token_ids)

            alone = [await run(prompt) for prompt in prompts[:2]]
            # One more request keeps a worker in the middle of all its sequences until it is killed.
            held = tokens(prompts[0], max_tokens=MAX_TOKENS, logits_post_processor_name=NAME)
            with hold:
                running = [asyncio.create_task(run(prompt)) for prompt in prompts]
                holding = asyncio.create_task(client.stream(held).result())
                os.kill(await hold.held(), signal.SIGKILL)
            answers = [await task for task in running]
            assert (await holding).token_ids == answers[0]
            await eventually_idle(stub)
    finally:
        service.stop()
    assert answers[:2] == alone
    pairs = list(zip(prompts, answers, strict=True))
    assert [len(answer) for answer in answers] == [MAX_TOKENS] * NUM_REQUESTS
    assert [wrong_tokens(model, *pair) for pair in pairs] == [[]] * NUM_REQUESTS
