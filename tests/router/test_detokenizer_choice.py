"""Which detokenizers a request is attached to while services with several tokenizers are connected."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from midstream.errors import UnavailableError
from midstream.rpc.frame_link import LinkSettings
from protos import detokenizer_pb2 as pb
from protos import generation_pb2
from router.pipeline.detokenizer_pool import DetokenizerLink, DetokenizerPool
from router.pipeline.streams import ClientStream


def pool_with(**tokenizers: str) -> DetokenizerPool:
    """Return the pool of a router with the tokenizer `own`, connected to these detokenizers."""
    settings = LinkSettings(1 << 20)
    pool = DetokenizerPool("127.0.0.1:1", settings, "own")
    for name, tokenizer in tokenizers.items():
        link = pool.links[name] = DetokenizerLink(name, settings, "", asyncio.Event(), lambda _: None)
        link.is_open = True
        if tokenizer:
            link._take(pb.StreamBatch(tokenizer_fingerprint=tokenizer))
    return pool


def refuse(link: DetokenizerLink, number: int) -> None:
    error = generation_pb2.ErrorInfo(code=14, message="has another tokenizer", field="tokenizer_fingerprint")
    link._take(pb.StreamBatch(chunks=[pb.StreamChunk(stream=number, error=error)]))


def attached(pool: DetokenizerPool, stream: ClientStream) -> str:
    attachment = pool.attach_now(stream)
    return "" if attachment is None else attachment.link.target


async def test_only_detokenizers_with_the_same_tokenizer_are_used() -> None:
    pool = pool_with(a="other", b="own", c="", d="own")
    assert pool.num_live == 2
    assert {attached(pool, ClientStream(f"r{number}", 1 << 20)) for number in range(6)} == {"b", "d"}
    assert attached(pool_with(a="other", c=""), ClientStream("r", 1 << 20)) == ""


async def test_a_request_that_began_with_another_tokenizer_gets_a_detokenizer_that_was_not_refused() -> None:
    pool = pool_with(a="other", b="own", d="own", e="third")
    stream = ClientStream("r", 1 << 20)
    attachment = pool.attach_now(stream)
    assert attachment is not None
    refuse(attachment.link, attachment._number)
    with pytest.raises(UnavailableError):
        await stream.take()
    assert attachment.link.refuses_until == 0, "it serves the requests of this router"
    assert attached(pool, stream) in ("a", "e")
    stream.foreign_tokenizers.add("third")
    assert attached(pool, stream) == "a"
    stream.foreign_tokenizers.add("other")
    assert attached(pool, stream) == ""


async def test_a_detokenizer_that_comes_back_with_another_tokenizer_is_not_used() -> None:
    pool = pool_with(b="own")
    link = pool.links["b"]
    link.is_open = False
    link._lose()
    link.is_open = True
    assert pool.num_live == 0
    link._take(pb.StreamBatch(tokenizer_fingerprint="other"))
    assert pool.num_live == 0


async def test_a_request_that_waits_while_a_detokenizer_is_opened_is_attached() -> None:
    """The first batch is read together with the welcome, and the request begins to wait before the link is open."""
    pool, settings = pool_with(), LinkSettings(1 << 20)
    link = pool.links["b"] = DetokenizerLink("b", settings, "", pool._live, lambda _: None)
    link._take(pb.StreamBatch(tokenizer_fingerprint="own"))
    waiting = asyncio.create_task(pool.attach(ClientStream("r", 1 << 20)))
    await asyncio.sleep(0)
    link._lost = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(link._run_frames(Mock()))
    assert (await asyncio.wait_for(waiting, 240)).link is link
    running.cancel()
    await asyncio.wait({running})
