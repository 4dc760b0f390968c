"""Request features through the whole service with the embedded model."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.errors import ExecutionError, InvalidArgumentError
from midstream.extras import Extras, Tensor
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from tests.integration.service import Service

STORY = [{"role": "user", "content": "Tell me a story about a little red fox."}]
VOCAB_SIZE, HIDDEN_SIZE = 49_152, 576
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "grey"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.routers()) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_model_folder("smollm2").path)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | fields)


def array(tensor: Tensor) -> NDArray[Any]:
    values: NDArray[Any] = np.frombuffer(tensor.data, dtype=tensor.dtype)
    return values.reshape(tensor.shape)


def extras_of(result: Result, index: int = 0) -> Extras:
    extras = result.sequences[index].extras
    assert extras is not None
    return extras


def log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    shifted: NDArray[Any] = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[Any] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def guided(kind: str, text: str, prompt: str = "Describe a fox.", **sampling: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(max_tokens=80)
    request.chat.messages.add(role="user", content=prompt)
    request.guided_decoding.guide_type = pb.GuideType.Value(f"GUIDE_TYPE_{kind}")
    request.guided_decoding.guide = text
    request.sampling.MergeFrom(pb.SamplingConfig(**sampling))
    return request


async def test_banned_words_are_not_generated(client: AsyncClient, tokenizer: Tokenizer) -> None:
    plain = await client.generate(messages=STORY, sampling=greedy()).result()
    words = re.findall(r"[a-z]{4,}", plain.text)[:3]
    steered = await client.generate(messages=STORY, sampling=greedy(bad_words=words)).result()
    for spelling in (spelling for word in words for spelling in (word, f" {word}")):
        ids = tokenizer.encode(spelling)
        assert ids not in [steered.token_ids[i : i + len(ids)] for i in range(len(steered.token_ids))]
    assert any(tokenizer.encode(f" {word}")[0] in plain.token_ids for word in words)
    pair = plain.token_ids[4:6]
    again = await client.generate(messages=STORY, sampling=greedy(bad_word_token_ids=[pair])).result()
    assert again.token_ids[:5] == plain.token_ids[:5]
    assert pair not in [again.token_ids[i : i + 2] for i in range(len(again.token_ids))]


async def test_no_ngram_is_repeated(client: AsyncClient) -> None:
    prompt = "red fox, blue cat, " * 5 + "red fox,"
    plain = await client.generate(prompt, sampling=greedy(max_tokens=12)).result()
    steered = await client.generate(prompt, sampling=greedy(max_tokens=12, no_repeat_ngram_size=2)).result()
    ids = Tokenizer(open_model_folder("smollm2").path).encode(prompt)

    def pairs(output: list[int]) -> list[tuple[int, int]]:
        known = ids + output
        return [(known[i], known[i + 1]) for i in range(len(ids) - 1, len(known) - 1)]

    known = set(itertools.pairwise(ids))
    assert known.intersection(pairs(plain.token_ids))
    assert not known.intersection(pairs(steered.token_ids))


async def test_everything_that_is_reported_agrees(client: AsyncClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12)
    wanted = greedy(
        max_tokens=10,
        log_probs=2,
        prompt_log_probs=1,
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs={"hidden_states.30": True, "topk_logits.4": False},
        return_perf_metrics=True,
    )
    # The second run finds the blocks of the prompt in the prefix cache, and still reports outputs for the whole prompt.
    plain = await client.generate(token_ids=prompt, sampling=greedy(max_tokens=10)).result()
    stream = client.generate(token_ids=prompt, sampling=wanted)
    result = await stream.result()
    assert result.token_ids == plain.token_ids
    assert plain.perf_metrics is None
    assert result.perf_metrics is not None
    assert result.perf_metrics.num_steps >= 10
    tensors, extras = {name: array(item) for name, item in result.sequences[0].tensors.items()}, extras_of(result)
    assert {name: values.shape for name, values in tensors.items()} == {
        "context_logits": (len(prompt), VOCAB_SIZE),
        "generation_logits": (10, VOCAB_SIZE),
        "context_hidden_states.30": (len(prompt), HIDDEN_SIZE),
        "hidden_states.30": (10, HIDDEN_SIZE),
        "topk_logits.4": (10, 4),
        "topk_logits.4.ids": (10, 4),
    }
    assert tensors["generation_logits"].argmax(axis=1).tolist() == result.token_ids
    assert np.array_equal(tensors["context_logits"][-1], tensors["generation_logits"][0])
    assert np.array_equal(tensors["topk_logits.4"][:, 0], tensors["generation_logits"].max(axis=1))
    assert tensors["topk_logits.4.ids"][:, 0].tolist() == result.token_ids
    assert extras.log_probs is not None
    assert extras.prompt_log_probs is not None
    known = log_softmax(tensors["context_logits"])[:-1]
    own = known[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(extras.prompt_log_probs.token_log_probs, own, atol=1e-4)
    assert list(extras.prompt_log_probs.top_token_ids) == known.argmax(axis=1).tolist()
    best = log_softmax(tensors["generation_logits"]).max(axis=1)
    np.testing.assert_allclose(extras.log_probs.token_log_probs, best, atol=1e-4)
    assert result.sequences[0].cumulative_log_prob == pytest.approx(sum(extras.log_probs.token_log_probs))
    # A client that resumes the request receives the complete tensors again.
    again = await client.resume(stream.request_id, 4).result()
    assert again.token_ids == result.token_ids[4:]
    assert again.sequences[0].tensors == result.sequences[0].tensors


async def test_sequences_share_one_report_of_the_prompt(client: AsyncClient) -> None:
    wanted = SamplingParams(
        max_tokens=4,
        num_return_sequences=2,
        prompt_log_probs=0,
        return_generation_logits=True,
        seed=3,
        temperature=1.0,
        top_p=1.0,
    )
    result = await client.generate("A long time ago", sampling=wanted).result()
    first, second = result.sequences
    assert extras_of(result).prompt_log_probs is not None
    assert extras_of(result, 1).prompt_log_probs is None
    for sequence in (first, second):
        assert sequence.tensors["generation_logits"].shape == (len(sequence.token_ids), VOCAB_SIZE)
    assert first.token_ids != second.token_ids


async def test_beams_report_what_they_are_scored_by(client: AsyncClient) -> None:
    wanted = SamplingParams(beam_width=3, num_return_sequences=3, max_tokens=6, log_probs=0, length_penalty=0.0)
    stream = client.generate("The capital of France is", sampling=wanted)
    result = await stream.result()
    scores = [sequence.cumulative_log_prob or 0.0 for sequence in result.sequences]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    for sequence, score in zip(result.sequences, scores, strict=True):
        log_probs = sequence.extras.log_probs if sequence.extras else None
        assert log_probs is not None
        assert len(log_probs.token_log_probs) == len(sequence.token_ids)
        assert sum(log_probs.token_log_probs) == pytest.approx(score, abs=1e-5)
    rest = await client.resume(stream.request_id, 2).result()
    assert extras_of(rest).log_probs == extras_of(result).log_probs.without(2)  # type: ignore[union-attr]


async def test_delivered_output_is_cumulative_and_includes_the_prompt(
    client: AsyncClient, tokenizer: Tokenizer
) -> None:
    prompt = "The capital of France is"
    ids = tokenizer.encode(prompt)
    plain = await client.generate(prompt, sampling=greedy(max_tokens=8)).result()
    echo = greedy(max_tokens=8, exclude_input_from_output=False, return_all_generated_tokens=True)
    chunks = [chunk async for chunk in client.generate(prompt, sampling=echo)]
    for chunk in chunks:
        assert chunk.token_offset == 0
        assert list(chunk.token_ids) == (ids + plain.token_ids)[: len(chunk.token_ids)]
        assert (prompt + plain.text).startswith(chunk.text)
    assert list(chunks[-1].token_ids) == ids + plain.token_ids
    assert chunks[-1].text == prompt + plain.text


async def test_json_matches_its_schema_in_100_of_100(client: AsyncClient) -> None:
    requests = [guided("JSON_SCHEMA", json.dumps(SCHEMA), temperature=1.0, seed=seed) for seed in range(100)]
    for request in requests:
        request.max_tokens = 160  # longer than any output that the schema allows
    results = await asyncio.gather(*(client.stream(request).result() for request in requests))
    for result in results:
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), SCHEMA)
    assert len({result.text for result in results}) > 50


async def test_expressions_grammars_and_json(client: AsyncClient) -> None:
    requests = [
        guided("REGEX", r"(red|blue|green) [0-9]{2}", temperature=1.0, seed=1),
        guided("EBNF_GRAMMAR", 'root ::= "I say " ("yes" | "no") "."', temperature=1.0, seed=2),
        guided("JSON", "", "Answer in JSON.", temperature=0.0, num_return_sequences=1),
    ]
    color, answer, anything = await asyncio.gather(*(client.stream(request).result() for request in requests))
    assert re.fullmatch(r"(red|blue|green) [0-9]{2}", color.text)
    assert answer.text in ("I say yes.", "I say no.")
    assert anything.text.startswith(("{", "["))
    if anything.finish_reason == "stop":
        json.loads(anything.text)


async def test_a_guide_that_cannot_be_followed_is_refused(client: AsyncClient) -> None:
    for kind, text in (("JSON_SCHEMA", "{"), ("REGEX", "("), ("EBNF_GRAMMAR", "root ::= missing")):
        with pytest.raises(InvalidArgumentError) as raised:
            await client.stream(guided(kind, text)).result()
        assert raised.value.field == "guided_decoding.guide"


async def test_post_processors_are_chosen_by_name(client: AsyncClient) -> None:
    def request(name: str, client_id: str) -> pb.GenerateRequest:
        request = pb.GenerateRequest(max_tokens=5, logits_post_processor_name=name, client_id=client_id)
        request.token_ids.values.extend([400, 500])
        request.stopping.ignore_eos = True
        return request

    names = [("count_up", "abc"), ("count_up_together", "abcd"), ("", "x"), ("count_up_together", "ab")]
    streams = [client.stream(request(*name)).result() for name in names]
    broken = [client.stream(request(*name)).result() for name in (("raises", "a"), ("count_up_together", "mallory"))]
    *results, first, second = await asyncio.gather(*streams, *broken, return_exceptions=True)
    assert isinstance(first, ExecutionError)
    assert isinstance(second, ExecutionError)
    assert "not for mallory" in second.message
    outputs = [result.token_ids for result in results if isinstance(result, Result)]
    assert [outputs[i] for i in (0, 1, 3)] == [[500 + step * i for i in range(1, 6)] for step in (3, 4, 2)]
    with pytest.raises(InvalidArgumentError) as raised:
        await client.stream(request("unheard_of", "a")).result()
    assert raised.value.field == "logits_post_processor_name"


async def test_tensors_that_are_too_large_are_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        await client.generate("hi", sampling=greedy(max_tokens=8000, return_generation_logits=True)).result()
    assert raised.value.field == "output"
