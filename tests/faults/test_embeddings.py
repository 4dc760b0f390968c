"""Embeddings through the whole service, compared with transformers, while components die."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from midstream.client import AsyncClient
from midstream.errors import InvalidArgumentError
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from tests.faults.in_process_service import KINDS, InProcessService
from tests.faults.small_model import make_small_model

TEXTS = ["so the stream goes on", "never lost", "日本語 😀", "so the stream goes on and on, " * 12]
# CPU workers compute linear layers with 16-bit activations.
ATOL = 1e-4
IDS = [list(range(400, 437)), [5], list(range(300, 480))]
TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}fits: "
ANSWERS = " never", " lost"
# An interpreter with llama-index-postprocessor-tei-rerank, whose requirements conflict with the project's.
TEI_PYTHON = os.environ.get("MIDSTREAM_TEI_PYTHON", "")
LLAMA_INDEX = """
import json, sys
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
query, *texts = json.loads(sys.argv[2])
ranker = TextEmbeddingInference(base_url=sys.argv[1], top_n=2)
nodes = ranker.postprocess_nodes([NodeWithScore(node=TextNode(text=text)) for text in texts], query_str=query)
print(json.dumps([[node.text, node.score] for node in nodes]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = make_small_model(tmp_path_factory.mktemp("small"))
    (folder.path / "chat_template.jinja").write_text(TEMPLATE)
    (folder.path / "1_LogitScore").mkdir()
    yes, no = answer_ids(folder)
    modules = (("Transformer", ""), ("Pooling", "pool"), ("Normalize", "2_Normalize"))
    (folder.path / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"a.{kind}"} for kind, path in modules])
    )
    (folder.path / "pool").mkdir()
    (folder.path / "pool" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken", "include_prompt": True}))
    (folder.path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "so the "}}))
    (folder.path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 180}))
    config = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    (folder.path / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    return open_model_folder(str(folder.path))


def answer_ids(folder: ModelFolder) -> list[int]:
    return [token for answer in ANSWERS for token in Tokenizer(folder.path).encode(answer)]


@pytest.fixture(scope="module")
def model(folder: ModelFolder) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder.path).eval()


@pytest.fixture
async def service(folder: ModelFolder, tmp_path: Path) -> AsyncIterator[InProcessService]:
    gc.freeze()
    service = InProcessService(folder, tmp_path / "journal")
    await service.start()
    service.gate.open_to(1 << 30)
    yield service
    await service.close()
    gc.unfreeze()


def states(model: Any, folder: ModelFolder, inputs: list[Any], *, is_mean: bool = False) -> np.ndarray[Any, Any]:
    """Return transformers' last hidden state after the final norm, either at the last token of each input or as the
    mean.
    """
    tokenizer = Tokenizer(folder.path)
    found = []
    for item in inputs:
        ids = tokenizer.encode(item) if isinstance(item, str) else item
        with torch.no_grad():
            state = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        found.append((state.mean(dim=0) if is_mean else state[-1]).numpy())
    return np.stack(found)


def unit(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    scaled: np.ndarray[Any, Any] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


async def test_every_api_gives_what_transformers_computes(
    service: InProcessService, model: Any, folder: ModelFolder
) -> None:
    await check_openais_client(service, model, folder)
    await check_scores_and_ranks(service, model, folder)
    await check_answers(service, model, folder)
    await check_key(service)
    await check_batch(service, model, folder)


async def check_openais_client(service: InProcessService, model: Any, folder: ModelFolder) -> None:
    expected = states(model, folder, TEXTS)
    async with openai.AsyncOpenAI(base_url=service.next_url() + "/v1", api_key="-", max_retries=0) as client:
        encodings: tuple[Any, ...] = ("float", "base64")
        for encoding in encodings:
            # If the format is set explicitly, OpenAI's client returns the data of the service unchanged.
            answer = await client.embeddings.create(input=TEXTS, model="", encoding_format=encoding)
            shown: list[Any] = [item.embedding for item in answer.data]
            if encoding == "base64":
                shown = [np.frombuffer(base64.b64decode(item), dtype="<f4") for item in shown]
            np.testing.assert_allclose(np.array(shown), unit(expected), atol=ATOL)
        assert [item.index for item in answer.data] == list(range(len(TEXTS)))
        tokens = sum(len(Tokenizer(folder.path).encode(text)) for text in TEXTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
        by_default = await client.embeddings.create(input=TEXTS[0], model=folder.name)
        np.testing.assert_allclose(by_default.data[0].embedding, unit(expected)[0], atol=ATOL)
        ids = await client.embeddings.create(input=IDS, model="", dimensions=16)
        shown = [item.embedding for item in ids.data]
        np.testing.assert_allclose(np.array(shown), unit(states(model, folder, IDS)[:, :16]), atol=ATOL)
        means = await client.embeddings.create(input=IDS, model="", extra_body={"pooling": "mean"})
        shown = [item.embedding for item in means.data]
        np.testing.assert_allclose(np.array(shown), unit(states(model, folder, IDS, is_mean=True)), atol=ATOL)
        one = await client.embeddings.create(input=IDS[0], model="", extra_body={"normalize": False})
        np.testing.assert_allclose(one.data[0].embedding, states(model, folder, IDS[:1])[0], rtol=1e-3, atol=10 * ATOL)
        query = await client.embeddings.create(input="stream", model="", extra_body={"prompt_name": "query"})
        np.testing.assert_allclose(
            query.data[0].embedding, unit(states(model, folder, ["so the stream"]))[0], atol=ATOL
        )
        for wrong, param in (
            ({"input": []}, "input"),
            ({"input": ["x", [5] * 181]}, "input[1]"),
            ({"input": ["x", ""]}, "input[1]"),
            ({"dimensions": 65}, None),
        ):
            with pytest.raises(openai.BadRequestError) as raised:
                await client.embeddings.create(**{"input": "x", "model": ""} | wrong)
            assert raised.value.param == (param or "dimensions")


async def check_scores_and_ranks(service: InProcessService, model: Any, folder: ModelFolder) -> None:
    vectors = unit(states(model, folder, TEXTS))
    cosines = vectors[1:] @ vectors[0]
    async with httpx.AsyncClient(base_url=service.next_url(), timeout=30) as http:
        for path in ("/score", "/v1/score"):
            texts = {"text_1": TEXTS[0], "text_2": TEXTS[1:], "pooling": "last"}
            answer = (await http.post(path, json=texts)).raise_for_status().json()
            np.testing.assert_allclose([item["score"] for item in answer["data"]], cosines, atol=ATOL)
        pairs = {"queries": TEXTS[:2], "documents": TEXTS[2:], "pooling": "last"}
        answer = (await http.post("/score", json=pairs)).raise_for_status().json()
        wanted = [vectors[0] @ vectors[2], vectors[1] @ vectors[3]]
        np.testing.assert_allclose([item["score"] for item in answer["data"]], wanted, atol=ATOL)
        order = sorted(range(3), key=lambda index: -cosines[index])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
            body: dict[str, Any] = {"model": folder.name, "query": TEXTS[0], "documents": documents, "top_n": 2}
            body["pooling"] = "last"
            answer = (await http.post(path, json=body)).raise_for_status().json()
            assert [item["index"] for item in answer["results"]] == order[:2]
            assert [item["document"]["text"] for item in answer["results"]] == [TEXTS[1 + i] for i in order[:2]]
            shown = [item["relevance_score"] for item in answer["results"]]
            np.testing.assert_allclose(shown, cosines[order[:2]], atol=ATOL)
        refused = await http.post("/score", json={"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_1")


async def check_answers(service: InProcessService, model: Any, folder: ModelFolder) -> None:
    """Check the scores of a model that answers yes or no, which CrossEncoder defines as the probabilities of these
    answers.
    """
    tokenizer, expected = Tokenizer(folder.path), []
    for document in TEXTS[1:]:
        ids = tokenizer.encode(f"query: {TEXTS[0]}\ndocument: {document}\nfits: ")
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, answer_ids(folder)]
        expected.append(float(logits.softmax(0)[0]))
    assert max(expected) - min(expected) > 100 * ATOL
    async with httpx.AsyncClient(base_url=service.next_url(), timeout=30) as http:
        answer = (await http.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]})).raise_for_status().json()
        np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=ATOL)
        answer = (
            (await http.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:]})).raise_for_status().json()
        )
        order = sorted(range(3), key=lambda index: -expected[index])
        assert [item["index"] for item in answer["results"]] == order
        long = await http.post("/rerank", json={"query": "q", "documents": ["short", "long " * 20_000]})
        await check_tei(http, order, [expected[index] for index in order])
    assert (long.status_code, long.json()["error"]["param"]) == (400, "documents[1]")


async def check_tei(http: httpx.AsyncClient, order: list[int], scores: list[float]) -> None:
    """Check the API of Text Embeddings Inference, also with LlamaIndex's client for it."""
    body = {
        "query": TEXTS[0],
        "texts": TEXTS[1:],
        "truncate": True,
        "raw_scores": False,
        "truncation_direction": "Right",
    }
    response = (await http.post("/rerank", json=body)).raise_for_status()
    answer = response.json()
    assert "x-midstream-ignored" not in response.headers
    assert [item.keys() for item in answer] == [{"index", "score"}] * 3
    assert [item["index"] for item in answer] == order
    np.testing.assert_allclose([item["score"] for item in answer], scores, atol=ATOL)
    texts = (await http.post("/rerank", json={**body, "return_text": True})).raise_for_status().json()
    assert texts == [{**item, "text": TEXTS[1 + item["index"]]} for item in answer]
    raw = (await http.post("/rerank", json={**body, "raw_scores": True})).raise_for_status().json()
    odds = [math.log(score / (1 - score)) for score in scores]
    np.testing.assert_allclose([item["score"] for item in raw], odds, atol=10 * ATOL)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"truncation_direction": "Left"}, "truncation_direction"),
        ({"documents": ["x"]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["x", 5]}, "texts[1]"),
        ({"texts": ["short", "long " * 20_000]}, "texts[1]"),
    ]
    for fields, param in refusals:
        refused = await http.post("/rerank", json={**body, **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    if TEI_PYTHON:
        command = [TEI_PYTHON, "-c", LLAMA_INDEX, str(http.base_url).rstrip("/"), json.dumps(TEXTS)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        found = json.loads((await process.communicate())[0])
        assert found == [[TEXTS[1 + item["index"]], pytest.approx(item["score"], abs=ATOL)] for item in answer[:2]]


async def check_key(service: InProcessService) -> None:
    """Check that a repeated call with the same key attaches to the first call."""
    async with httpx.AsyncClient(timeout=30, headers={"idempotency-key": "k"}) as http:
        first = await http.post(service.next_url() + "/v1/embeddings", json={"input": TEXTS})
        again = await http.post(service.next_url() + "/v1/embeddings", json={"input": TEXTS})
        assert again.json()["data"] == first.raise_for_status().json()["data"]
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        other = await http.post(service.next_url() + "/v1/embeddings", json={"input": TEXTS[::-1]})
    assert (other.status_code, json.loads(other.text)["error"]["param"]) == (400, "Idempotency-Key")


async def check_batch(service: InProcessService, model: Any, folder: ModelFolder) -> None:
    body = {"input": TEXTS[:2], "encoding_format": "float"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    async with openai.AsyncOpenAI(base_url=service.next_url() + "/v1", api_key="-", max_retries=0) as client:
        file = await client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        async with asyncio.timeout(240):
            while batch.output_file_id is None:
                assert batch.errors is None
                await asyncio.sleep(0.1)
                batch = await client.batches.retrieve(batch.id)
        answer = json.loads((await client.files.content(batch.output_file_id)).text)["response"]["body"]
    shown = [item["embedding"] for item in answer["data"]]
    np.testing.assert_allclose(np.array(shown), unit(states(model, folder, TEXTS[:2])), atol=ATOL)
    assert batch.usage is not None
    assert batch.usage.total_tokens == answer["usage"]["prompt_tokens"]


async def test_a_classifier_scores_and_ranks_by_its_head(tmp_path: Path) -> None:
    folder = make_small_model(tmp_path / "model", num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder.path).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder.path / "tokenizer.json"))
    expected = []
    for document in TEXTS[1:]:
        with torch.no_grad():
            expected.append(float(model(**tokenizer(TEXTS[0], document, return_tensors="pt")).logits.sigmoid()))
    assert max(expected) - min(expected) > 100 * ATOL
    service = InProcessService(folder, tmp_path / "journal")
    await service.start()
    service.gate.open_to(1 << 30)
    try:
        async with httpx.AsyncClient(base_url=service.next_url(), timeout=30) as http:
            answer = await http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]})
            scores = [item["score"] for item in answer.raise_for_status().json()["data"]]
            np.testing.assert_allclose(scores, expected, atol=ATOL)
            answer = await http.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:]})
            order = sorted(range(3), key=lambda index: -expected[index])
            assert [item["index"] for item in answer.raise_for_status().json()["results"]] == order
            assert (await http.post("/v1/embeddings", json={"input": "x"})).status_code == 200
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
            assert "classification head" in refused.json()["error"]["message"]
    finally:
        await service.close()


async def test_vectors_are_delivered_once_after_any_death(
    service: InProcessService, model: Any, folder: ModelFolder
) -> None:
    inputs: list[Any] = [*TEXTS, *IDS]
    tokenizer, expected = Tokenizer(folder.path), unit(states(model, folder, inputs, is_mean=True))
    num_tokens = [len(tokenizer.encode(item)) if isinstance(item, str) else len(item) for item in inputs]
    for kind in KINDS:
        answers = []

        async def embed() -> None:
            async with AsyncClient(service.addresses) as client:
                made = await client.embed(inputs, pooling="mean", cache_salt=kind)  # noqa: B023 (it is awaited here)
                answers.append(made)  # noqa: B023

        await service.disturb(embed(), {0: kind})
        assert service.num_kills[kind] == 1
        [answer] = answers
        np.testing.assert_allclose(np.array(answer.vectors), expected, atol=ATOL)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(num_tokens), 0)
    async with AsyncClient(service.addresses) as client:
        with pytest.raises(InvalidArgumentError) as raised:
            await client.embed([[1 << 20]])
        assert raised.value.field == "inputs[0].token_ids"
