"""A model without a native implementation in the whole service: it is prepared with the command, served and queried."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import loads_pb2, openengine_pb2_grpc
from protos import openengine_pb2 as oe
from tests.gpu_worker.adapters import adapted, make_lora, make_prompt
from tests.gpu_worker.greedy import wrong_tokens
from tests.integration.service import Service, collect, latest_stats, midstream, stub_of, tokens

if TYPE_CHECKING:
    from protos.openengine_pb2_grpc import ControlAsyncStub

PROMPT = "a small red fox"
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Write a tiny random Gemma 2 model whose tokens are bytes."""
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
        tie_word_embeddings=False,  # otherwise the model would repeat its last token
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
    # There are few blocks, so that requests are preempted.
    service = Service.start(
        tmp_path_factory.mktemp("service"),
        "--model",
        str(prepared),
        MIDSTREAM_CAPACITY_POLICY="max_utilization",
        MIDSTREAM_MAX_KV_TOKENS="512",
        MIDSTREAM_MAX_CONTEXT_CHUNK="7",
        MIDSTREAM_ADAPTER_ROOT=tempfile.gettempdir(),
        MIDSTREAM_IMPLEMENTATION="transformers",
    )
    yield service
    service.stop()


async def test_greedy_tokens_are_those_that_transformers_generates(
    gemma2: tuple[Any, Path], gemma2_service: Service
) -> None:
    model, folder = gemma2
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    request = pb.GenerateRequest(
        prompt=PROMPT,
        max_tokens=MAX_TOKENS,
        stopping=pb.StoppingConfig(ignore_eos=True),
        sampling=pb.SamplingConfig(temperature=0),
    )
    async with stub_of(gemma2_service.routers()[0]) as stub:
        answer = await collect(stub, request)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer.token_ids == expected[0, len(prompt) :].tolist()


async def test_windowed_layers_beside_others_get_the_right_tokens_when_blocks_are_short(
    gemma2: tuple[Any, Path], gemma2_service: Service
) -> None:
    """One of the two layers attends to 8 tokens, the other layer to all tokens."""
    draw = random.Random(5)
    prompts = [[draw.randrange(1, 256) for _ in range(draw.randint(20, 60))] for _ in range(24)]
    requests = [tokens(prompt, max_tokens=48) for prompt in prompts]
    async with stub_of(gemma2_service.routers()[0]) as stub:
        answers = await asyncio.gather(*(collect(stub, request) for request in requests))
        stats = await latest_stats(stub)
    assert stats.num_preemptions > 0
    assert [len(answer.token_ids) for answer in answers] == [48] * 24
    pairs = zip(prompts, answers, strict=True)
    assert [wrong_tokens(gemma2[0], prompt, answer.token_ids) for prompt, answer in pairs] == [[]] * 24


def test_a_narrower_window_reaches_scheduler_and_worker(gemma2: tuple[Any, Path], tmp_path: Path) -> None:
    service = Service.start(tmp_path, "--model", str(gemma2[1]), MIDSTREAM_MAX_ATTENTION_WINDOW="4")
    try:
        asyncio.run(_check_narrow(gemma2[0], service))
    finally:
        service.stop()


async def _check_narrow(model: Any, service: Service) -> None:
    config = transformers.Gemma2Config.from_dict(
        model.config.to_dict() | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    )
    narrow = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    narrow.load_state_dict(model.state_dict())
    prompt = list(range(30, 70))
    async with stub_of(service.routers()[0]) as stub:
        answer = await collect(stub, tokens(prompt, max_tokens=24))
    assert wrong_tokens(narrow, prompt, answer.token_ids) == []
    assert wrong_tokens(model, prompt, answer.token_ids) != []


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """Return the status and the field of a rejected call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    fields = dict(raised.value.trailing_metadata() or ())
    return raised.value.code(), str(fields.get("midstream-field", ""))


async def test_lora_is_rejected_by_every_api_and_not_advertised(
    gemma2: tuple[Any, Path], gemma2_service: Service, tmp_path: Path
) -> None:
    make_lora(gemma2[0], tmp_path / "lora", seed=1, r=4, target_modules=["q_proj"])
    address = gemma2_service.routers()[0]
    folder = str(tmp_path / "lora")
    unsupported = grpc.StatusCode.UNIMPLEMENTED
    async with stub_of(address) as stub:
        features = (await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), timeout=240)).features
        assert "lora" not in features
        assert "prompt_tuning" in features
        load = stub.LoadLora(loads_pb2.LoadLoraRequest(name="tone", path=folder), timeout=240)
        assert await refusal(load) == (unsupported, "path")
        for lora in (pb.LoraConfig(name="tone"), pb.LoraConfig(name="tone", path=folder)):
            request = tokens(range(1, 9), max_tokens=2, lora=lora)
            assert await refusal(collect(stub, request)) == (unsupported, "lora")
        assert not (await stub.ListLoras(loads_pb2.ListLorasRequest(), timeout=240)).loras
    command = midstream("lora", "load", "tone", folder, "--run-dir", str(gemma2_service.run_dir))
    assert command.returncode != 0
    assert "transformers implementation" in command.stderr
    async with open_channel(address) as channel:
        control = cast("ControlAsyncStub", openengine_pb2_grpc.ControlStub(channel))
        assert not (await control.GetModelInfo(oe.GetModelInfoRequest(), timeout=240)).supports_lora


async def test_a_prompt_adapter_gives_what_peft_computes(
    gemma2: tuple[Any, Path], gemma2_service: Service, tmp_path: Path
) -> None:
    model, _ = gemma2
    make_prompt(model, tmp_path / "prompt", seed=2, num_virtual_tokens=5)
    prompt = list(range(1, 13))
    async with stub_of(gemma2_service.routers()[0]) as stub:
        load = loads_pb2.LoadLoraRequest(name="virtual", path=str(tmp_path / "prompt"))
        await stub.LoadLora(load, timeout=240)
        tuning = pb.PromptTuningConfig(name="virtual")
        answer = await collect(stub, tokens(prompt, max_tokens=MAX_TOKENS, prompt_tuning=tuning))
    wanted: list[int] = []
    with adapted(model, tmp_path / "prompt") as with_prompt:
        for _ in range(MAX_TOKENS):
            logits = with_prompt(torch.tensor([prompt + wanted])).logits[0, -1]
            wanted.append(int(logits.argmax()))
    assert answer.token_ids == wanted
