"""A model without code of ours through the whole service: prepared by the command, served, asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protos import generation_pb2 as pb
from tests.integration.service import Service, collect, midstream, stub_of

PROMPT = "a small red fox"
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny random Gemma 2 whose tokens are bytes, and its folder."""
    folder = tmp_path_factory.mktemp("gemma2")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, folder


@pytest.fixture(scope="module")
def gemma2_service(gemma2: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    prepared = tmp_path_factory.mktemp("prepared") / "model"
    result = midstream("prepare", str(gemma2[1]), "--output", str(prepared))
    assert result.returncode == 0, result.stderr
    assert "gemma2, 2 layers" in result.stdout
    service = Service.start(tmp_path_factory.mktemp("service"), "--model", str(prepared))
    yield service
    service.stop()


async def test_greedy_tokens_are_those_that_transformers_generates(
    gemma2: tuple[Any, Path], gemma2_service: Service
) -> None:
    model, folder = gemma2
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    request = pb.GenerateRequest(
        prompt=PROMPT,
        max_tokens=MAX_TOKENS,
        stopping=pb.StoppingConfig(ignore_eos=True),
        sampling=pb.SamplingConfig(temperature=0),
    )
    async with stub_of(gemma2_service.routers()[0]) as stub:
        answer = await collect(stub, request)
    expected = model.generate(
        torch.tensor([tokens]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer.token_ids == expected[0, len(tokens) :].tolist()
