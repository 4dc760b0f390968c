"""What the files of sentence-transformers say about a model's embeddings, and embedding requests that are aborted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from midstream.client import AsyncClient
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import generation_pb2, service_pb2, service_pb2_grpc
from router.pipeline.embedder import Embedder, EmbedInput, Pooling, VectorShape
from tests.router.conftest import Cluster

POOLING = {"embedding_dimension": 576, "pooling_mode": "mean", "include_prompt": True}
PROMPTS = {"prompts": {"query": "find: ", "empty": ""}, "default_prompt_name": None}


def embedder_of(folder: Path, pooling: dict[str, Any], modules: tuple[str, ...] = (), **settings: Any) -> Embedder:
    """Return an embedder for a model with these settings of sentence-transformers, without a service."""
    types = ("Transformer", "Pooling", *modules)
    paths = ("", "p", *(f"{number}_x" for number in range(2, len(types))))
    listed = [{"path": path, "type": f"a.{kind}"} for path, kind in zip(paths, types, strict=True)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS | settings))
    (folder / "p").mkdir()
    (folder / "p" / "config.json").write_text(json.dumps(POOLING | pooling))
    front: Any = SimpleNamespace(runner=SimpleNamespace(model=replace(open_model_folder("smollm2"), path=folder)))
    return Embedder(front)


@pytest.mark.parametrize(
    ("settings", "call", "field", "message"),
    [
        ({"pooling": {"pooling_mode": "max"}}, {}, "pooling", "set to last or mean: the model's p/config.json has max"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, {}, "pooling", "has cls and mean"),
        ({"pooling": {}, "modules": ("Dense",)}, {"pooling": Pooling.LAST}, "model", r"not computed: Dense \(2_x\)"),
        ({"pooling": {}}, {"prompt_name": "passage"}, "prompt_name", "one of the model's prompts: 'query', 'empty'"),
        (
            {"pooling": {"include_prompt": False}, "default_prompt_name": "query"},
            {},
            "prompt_name",
            r"p/config\.json excludes the prompt from the mean",
        ),
    ],
)
async def test_what_a_model_of_sentence_transformers_needs_is_computed_or_refused(
    tmp_path: Path, settings: dict[str, Any], call: dict[str, Any], field: str, message: str
) -> None:
    embedder = embedder_of(tmp_path, **settings)
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=message) as raised:
        await embedder.embed(generation_pb2.GenerateRequest(), [EmbedInput("input", "a")], VectorShape(), **call)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("settings", "call", "prompts"),
    [
        ({"pooling": {}}, {}, ["a", [5]]),
        ({"pooling": {}}, {"prompt_name": "query"}, ["find: a", [5]]),
        ({"pooling": {}, "default_prompt_name": "query"}, {}, ["find: a", [5]]),
        ({"pooling": {}, "default_prompt_name": "query"}, {"prompt_name": "empty"}, ["a", [5]]),
        # At the last token, the prompt is not excluded from anything.
        (
            {"pooling": {"pooling_mode": "lasttoken", "include_prompt": False}},
            {"prompt_name": "query"},
            ["find: a", [5]],
        ),
        ({"pooling": {"include_prompt": False}}, {}, ["a", [5]]),
        ({"pooling": {}, "modules": ("Normalize", "Dropout")}, {}, ["a", [5]]),
    ],
)
async def test_prompts_are_put_before_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], call: dict[str, Any], prompts: list[Any]
) -> None:
    embedder, found = embedder_of(tmp_path, **settings), list[Any]()

    async def compute(base: object, inputs: list[EmbedInput], *_: object) -> tuple[list[object], None]:
        found.extend(item.prompt for item in inputs)
        return [], None

    monkeypatch.setattr(embedder, "_compute", compute)
    inputs = [EmbedInput("input[0]", "a"), EmbedInput("input[1]", [5])]
    await embedder.embed(generation_pb2.GenerateRequest(), inputs, VectorShape(), **call)
    assert found == prompts


async def test_an_aborted_request_is_not_an_internal_error(cluster: Cluster) -> None:
    part = await cluster.add_router(await cluster.add_detokenizer())
    async with open_channel(part.address) as channel, AsyncClient(part.address) as client:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        item = service_pb2.EmbedInput(prompt="hello")
        request = service_pb2.EmbedRequest(request_id="e", inputs=[item], pooling=service_pb2.POOLING_LAST)
        answer = asyncio.ensure_future(stub.Embed(request, timeout=240))
        await cluster.scheduler.until(lambda: "e" in cluster.scheduler.requests)
        assert await client.abort("e")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await answer
    assert raised.value.code() is grpc.StatusCode.CANCELLED
