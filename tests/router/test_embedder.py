"""The pooling of embeddings that a model specifies, and embedding requests that are aborted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from midstream.client import AsyncClient
from midstream.errors import ConfigError
from midstream.rpc.serving import open_channel
from protos import service_pb2, service_pb2_grpc
from router.pipeline.embedder import Pooling, pooling_of
from tests.router.conftest import Cluster


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
    ],
)
def test_a_models_pooling_equals_that_of_sentence_transformers(
    tmp_path: Path, modes: dict[str, bool], expected: Pooling | None
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    assert pooling_of(tmp_path) is expected


def test_without_a_file_it_is_the_last_token(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) is Pooling.LAST
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        pooling_of(tmp_path)


async def test_an_aborted_request_is_not_an_internal_error(cluster: Cluster) -> None:
    part = await cluster.add_router(await cluster.add_detokenizer())
    async with open_channel(part.address) as channel, AsyncClient(part.address) as client:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        item = service_pb2.EmbedInput(prompt="hello")
        request = service_pb2.EmbedRequest(request_id="e", inputs=[item], pooling=service_pb2.POOLING_LAST)
        answer = asyncio.ensure_future(stub.Embed(request, timeout=60))
        await cluster.scheduler.until(lambda: "e" in cluster.scheduler.requests)
        assert await client.abort("e")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await answer
    assert raised.value.code() is grpc.StatusCode.CANCELLED
