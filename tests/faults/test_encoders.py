"""Encoders behind the HTTP APIs, compared with transformers and, if there is an interpreter with it in
TEST_SENTENCE_TRANSFORMERS_PYTHON, with sentence-transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch

from midstream.client import AsyncClient
from midstream.errors import InvalidArgumentError
from midstream.model.folder import open_model_folder
from tests.faults.in_process_service import InProcessService
from tests.gpu_worker.encoder_models import add_tokenizer, make_encoder

TEXTS = ["where is water high", "a cat", "the river floods in spring, and the meadow", "x"]
LONG = "every word counts " * 12
ATOL = 1e-4
ORACLE_PYTHON = os.environ.get("TEST_SENTENCE_TRANSFORMERS_PYTHON", "")
ORACLE = """
import json, sys
import sentence_transformers
kind, folder, texts, more = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
if kind == "vectors":
    found = sentence_transformers.SentenceTransformer(folder, device="cpu").encode(texts, **more)
else:
    found = sentence_transformers.CrossEncoder(folder, device="cpu").predict(texts, **more)
print(json.dumps(found.tolist()))
"""


def of_sentence_transformers(kind: str, folder: Path, texts: list[Any], **more: Any) -> np.ndarray[Any, Any]:
    """Return what sentence-transformers computes."""
    command = [ORACLE_PYTHON, "-c", ORACLE, kind, str(folder), json.dumps(texts), json.dumps(more)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    return np.array(json.loads(done.stdout))


@contextlib.asynccontextmanager
async def serving(folder: Path, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """Serve the model; yield a client and the addresses for gRPC."""
    service = InProcessService(open_model_folder(str(folder)), tmp_path / "journal")
    await service.start()
    service.gate.open_to(1 << 30)
    try:
        async with httpx.AsyncClient(base_url=service.next_url(), timeout=30) as http:
            yield http, service.addresses
    finally:
        await service.close()


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(http: httpx.AsyncClient, path: str, **body: Any) -> tuple[str, str]:
    """Return the field and the message of a refusal."""
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"].removeprefix(f"{error['param']}: ")


def write_modules(folder: Path, pooling: str) -> None:
    """Write the files of sentence-transformers."""
    package = "sentence_transformers"
    kinds = {
        "": f"{package}.base.modules.transformer.Transformer",
        "1_Pooling": f"{package}.sentence_transformer.modules.pooling.Pooling",
        "2_Normalize": f"{package}.sentence_transformer.modules.normalize.Normalize",
    }
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    (folder / "modules.json").write_text(json.dumps(listed))
    for place in ("1_Pooling", "2_Normalize"):
        (folder / place).mkdir()
    settings = {"embedding_dimension": 64, "pooling_mode": pooling, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 80, "do_lower_case": False}))


def unit(rows: Any) -> np.ndarray[Any, Any]:
    array = np.array(rows, dtype=np.float64)
    scaled: np.ndarray[Any, Any] = array / np.linalg.norm(array, axis=-1, keepdims=True)
    return scaled


@pytest.mark.parametrize(("family", "pooling"), [("Bert", "mean"), ("Roberta", "cls"), ("ModernBert", "weightedmean")])
async def test_vectors_are_those_of_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    folder = tmp_path / "model"
    model = make_encoder(folder, family)
    tokenizer = add_tokenizer(folder, family)
    write_modules(folder, pooling)

    def states(text: str, **more: Any) -> Any:
        with torch.inference_mode():
            return model(**tokenizer(text, return_tensors="pt", **more)).last_hidden_state[0].numpy()

    def pooled(rows: Any) -> Any:
        places = np.arange(1, len(rows) + 1)[:, None]
        found = {"mean": rows.mean(0), "cls": rows[0], "weightedmean": (rows * places).sum(0) / places.sum()}
        return found[pooling]

    wanted = unit([pooled(states(text)) for text in TEXTS])
    async with serving(folder, tmp_path) as (http, addresses):

        async def vectors(texts: list[Any], **more: Any) -> Any:
            answer = await post(http, "/v1/embeddings", input=texts, **more)
            return np.array([item["embedding"] for item in answer["data"]])

        np.testing.assert_allclose(await vectors(TEXTS), wanted, atol=ATOL)
        assert ((await vectors(TEXTS) * wanted).sum(-1) > 0.99999).all()
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        np.testing.assert_allclose(await vectors(ids), wanted, atol=ATOL)
        cut = unit(wanted[:, :16])
        np.testing.assert_allclose(await vectors(TEXTS, dimensions=16), cut, atol=ATOL)
        raw = np.array([pooled(states(text)) for text in TEXTS])
        np.testing.assert_allclose(await vectors(TEXTS, normalize=False), raw, atol=10 * ATOL)
        async with AsyncClient(addresses) as client:
            of_client = await client.embed(TEXTS, pooling="weightedmean")
            shorter = await client.embed([LONG], truncate_prompt_tokens=7)
            with pytest.raises(InvalidArgumentError, match="must be at least 1, or -1"):
                await client.embed("a", truncate_prompt_tokens=0)
        weighted = [rows * np.arange(1, len(rows) + 1)[:, None] for rows in map(states, TEXTS)]
        np.testing.assert_allclose(of_client.vectors, unit([rows.sum(0) for rows in weighted]), atol=ATOL)
        largest = unit([states(text).max(0) for text in TEXTS])
        np.testing.assert_allclose(await vectors(TEXTS, pooling="max"), largest, atol=ATOL)
        found = await vectors(["cat"], prompt_name="query")
        np.testing.assert_allclose(found, unit([pooled(states("find: cat"))]), atol=ATOL)

        short = unit([pooled(states(LONG, truncation=True, max_length=7))])
        np.testing.assert_allclose(await vectors([LONG], truncate_prompt_tokens=7), short, atol=ATOL)
        np.testing.assert_allclose(shorter.vectors, short, atol=ATOL)
        most = unit([pooled(states(LONG, truncation=True, max_length=80))])
        for more in ({"truncate_prompt_tokens": -1}, {"truncate": True}):
            np.testing.assert_allclose(await vectors([LONG], **more), most, atol=ATOL)
        assert await refusal(http, "/v1/embeddings", input=LONG, truncate_prompt_tokens=81) == (
            "truncate_prompt_tokens",
            "is 81; this model takes at most 80",
        )
        assert (await refusal(http, "/v1/embeddings", input=LONG))[0] == "input"
        answer = await post(http, "/score", text_1=TEXTS[0], text_2=TEXTS[1:])
        np.testing.assert_allclose([item["score"] for item in answer["data"]], wanted[1:] @ wanted[0], atol=ATOL)
        assert (await refusal(http, "/score", text_1="a", text_2="b", use_activation=False))[0] == "use_activation"
        assert (await refusal(http, "/classify", input="a")) == ("model", "the model has no classification head")
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ):
            response = await http.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
            assert response.status_code == 400
            assert "generates no text; use embeddings" in response.text
    if ORACLE_PYTHON:
        np.testing.assert_allclose(of_sentence_transformers("vectors", folder, TEXTS), wanted, atol=ATOL)
        np.testing.assert_allclose(of_sentence_transformers("vectors", folder, [LONG]), most, atol=ATOL)
        again = of_sentence_transformers("vectors", folder, TEXTS, truncate_dim=16, normalize_embeddings=True)
        np.testing.assert_allclose(again, cut, atol=ATOL)
        again = of_sentence_transformers("vectors", folder, ["cat"], prompt_name="query")
        np.testing.assert_allclose(again, found, atol=ATOL)


IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "6.2.0"}}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Bert", {}),
        ("Roberta", IDENTITY),
        ("ModernBert", {"sbert_ce_default_activation_function": "torch.nn.Identity"}),
        ("DistilBert", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}),
    ],
)
async def test_scores_of_pairs_are_those_of_a_cross_encoder(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    model = make_encoder(folder, family, 1)
    tokenizer = add_tokenizer(folder, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    documents = [*TEXTS[1:], LONG]
    logits = []
    for document in documents:
        pair = tokenizer(TEXTS[0], document, return_tensors="pt", truncation="longest_first", max_length=94)
        with torch.inference_mode():
            logits.append(float(model(**pair).logits))
    wanted = np.array(logits) if "dentity" in str(settings) else 1 / (1 + np.exp(-np.array(logits)))
    async with serving(folder, tmp_path) as (http, _):
        answer = await post(http, "/score", text_1=TEXTS[0], text_2=documents, truncate_prompt_tokens=94)
        np.testing.assert_allclose([item["score"] for item in answer["data"]], wanted, atol=ATOL, rtol=ATOL)
        ranked = await post(http, "/rerank", query=TEXTS[0], texts=documents, truncate=True, raw_scores=True)
        short = [item for item in ranked if item["index"] < 3]
        assert [item["index"] for item in short] == sorted(range(3), key=lambda index: -logits[index])
        for item in short:
            assert item["score"] == pytest.approx(logits[item["index"]], abs=ATOL, rel=ATOL)
        assert (await refusal(http, "/score", text_1="a", text_2=LONG * 2))[0] == "text_2[0]"
        assert "classification head" in (await refusal(http, "/v1/completions", prompt="a"))[1]
    if ORACLE_PYTHON:
        pairs = [[TEXTS[0], document] for document in TEXTS[1:]]
        np.testing.assert_allclose(of_sentence_transformers("scores", folder, pairs), wanted[:3], atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
    ],
)
async def test_classes_are_those_of_the_head(tmp_path: Path, settings: dict[str, Any], activation: str) -> None:
    folder = tmp_path / "model"
    labels = {0: "calm", 1: "glad", 2: "sad"}
    model = make_encoder(folder, "Bert", 3, id2label=labels, **settings)
    tokenizer = add_tokenizer(folder, "Bert")
    with torch.inference_mode():
        logits = torch.stack([model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS])
    wanted = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "identity": logits}[activation]
    async with serving(folder, tmp_path) as (http, _):
        answer = await post(http, "/classify", input=TEXTS, request_id="c")
        assert answer.keys() == {"id", "object", "created", "model", "data", "usage"}
        assert (answer["id"], answer["object"]) == ("classify-c", "list")
        assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
        for index, (item, values) in enumerate(zip(answer["data"], wanted, strict=True)):
            assert item == {
                "index": index,
                "label": labels[int(values.argmax())],
                "probs": pytest.approx(values.tolist(), abs=ATOL, rel=ATOL),
                "num_classes": 3,
            }
        raw = await post(http, "/classify", input=[tokenizer(TEXTS[0])["input_ids"]], use_activation=False)
        assert raw["data"][0]["probs"] == pytest.approx(logits[0].tolist(), abs=ATOL, rel=ATOL)
        assert (await refusal(http, "/score", text_1="a", text_2="b"))[0] == "pooling"
        assert (await refusal(http, "/classify", input="a", messages=[{}]))[0] == "messages"
