"""One trace shows what every component does for a request, from the router to each step of the worker."""

from __future__ import annotations

import asyncio
import json
import secrets
import urllib.request
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from midstream.telemetry.tracing import TraceParent
from tests.integration.collector import Collector, Span
from tests.integration.service import Service, chat, collect, eventually

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 8
CLIENT = TraceParent(secrets.randbits(128), secrets.randbits(64))


ROUTER = ("chat ", "text_completion ")  # a router's span has the operation and the model as its name


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def of_router(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name.startswith(ROUTER)]


def has_all(spans: Sequence[Span], num_tokens: int = NUM_TOKENS) -> bool:
    """Return whether all expected spans are there. There may be more decode steps, since steps are sent before the end
    of the output is known.
    """
    names = Counter(span.name for span in spans)
    parts = ("scheduler.request", "detokenizer.stream", "worker.prefill")
    return bool(of_router(spans)) and all(names[part] for part in parts) and names["worker.decode"] >= num_tokens - 1


async def test_a_request_is_one_trace_over_all_parts(stub: Stub, collector: Collector) -> None:
    request = chat("Count to nine.", request_id="traced", max_tokens=NUM_TOKENS)
    request.stopping.ignore_eos = True
    call = stub.Generate(request, metadata=[("traceparent", str(CLIENT))])
    num_received = 0
    async for response in call:
        num_received += len(response.token_ids)
    assert num_received == NUM_TOKENS
    spans = collector.await_spans(f"{CLIENT.trace_id:032x}", has_all)
    assert {span.service for span in spans} == {
        "midstream-router",
        "midstream-scheduler",
        "midstream-worker",
        "midstream-detokenizer",
    }
    assert {span.attributes["midstream.request_id"] for span in spans} == {"traced"}
    assert {span.error for span in spans} == {""}
    (router,) = of_router(spans)
    (scheduler,) = named(spans, "scheduler.request")
    (detokenizer,) = named(spans, "detokenizer.stream")
    assert router.parent_id == f"{CLIENT.span_id:016x}"
    assert scheduler.parent_id == detokenizer.parent_id == router.span_id
    others = [span for span in spans if span not in (router, scheduler, detokenizer)]
    assert {span.parent_id for span in others} == {scheduler.span_id}
    assert detokenizer.attributes["midstream.tokens"] == NUM_TOKENS
    assert scheduler.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    # The queue, prefill and decode spans are consecutive and cover the time in the scheduler.
    phases = [named(spans, f"scheduler.{name}")[0] for name in ("queue", "prefill", "decode")]
    assert phases[0].start_ns == scheduler.start_ns
    assert [one.end_ns for one in phases[:-1]] == [after.start_ns for after in phases[1:]]
    assert phases[-1].end_ns == scheduler.end_ns
    # Each decode step appears once, and the steps do not overlap.
    steps = named(spans, "worker.prefill") + named(spans, "worker.decode")
    ids = [span.attributes["midstream.step_id"] for span in steps]
    assert len(set(ids)) == len(ids)
    assert len(named(spans, "worker.decode")) in (NUM_TOKENS - 1, NUM_TOKENS)
    assert all(one.end_ns <= after.start_ns + 1_000_000 for one, after in pairwise(steps))


def test_http_clients_join_their_traces_too(service: Service, collector: Collector) -> None:
    client = TraceParent(secrets.randbits(128), secrets.randbits(64))
    (http, *_) = [process["addresses"]["http"] for process in service.processes("router")]
    body = b'{"prompt": "One, two,", "max_tokens": 2}'
    headers = {"content-type": "application/json", "traceparent": str(client)}
    call = urllib.request.Request(f"http://{http}/v1/completions", body, headers)
    with urllib.request.urlopen(call, timeout=240) as answer:
        assert answer.status == 200
    spans = collector.await_spans(f"{client.trace_id:032x}", lambda spans: has_all(spans, 2))
    assert of_router(spans)[0].parent_id == f"{client.span_id:016x}"
    assert has_all(spans, 2)


async def test_a_refused_request_says_why(stub: Stub, collector: Collector) -> None:
    client = TraceParent(secrets.randbits(128), secrets.randbits(64))
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Generate(chat("x", model="other"), metadata=[("traceparent", str(client))]).read()
    (span,) = collector.await_spans(f"{client.trace_id:032x}", lambda spans: len(spans) == 1)
    assert "other" in span.error


async def test_requests_that_clients_do_not_sample_are_not_traced(stub: Stub, collector: Collector) -> None:
    unwanted = TraceParent(secrets.randbits(128), secrets.randbits(64), is_sampled=False)
    wanted = TraceParent(secrets.randbits(128), secrets.randbits(64))
    for client in (unwanted, wanted):
        await stub_read(stub, client)
    await collect(
        stub, chat("x", max_tokens=1)
    )  # the client requests no trace, and the service is configured to trace none of these requests
    assert has_all(collector.await_spans(f"{wanted.trace_id:032x}", lambda spans: has_all(spans, 1)), 1)
    assert collector.spans(f"{unwanted.trace_id:032x}") == []


async def stub_read(stub: Stub, client: TraceParent) -> None:
    async for _ in stub.Generate(chat("x", max_tokens=1), metadata=[("traceparent", str(client))]):
        pass


async def test_the_log_of_every_part_names_the_request(service: Service, stub: Stub) -> None:
    await collect(stub, chat("Say hello.", request_id="logged", max_tokens=2))
    seen = await eventually(
        lambda: asyncio.to_thread(parts_that_log, service, "logged"), lambda kinds: len(kinds) == 4, 60
    )
    assert seen == {"router", "scheduler", "gpu_worker", "detokenizer"}


def parts_that_log(service: Service, request_id: str) -> set[str]:
    """Return the components whose log lines contain the request id; check that every log line is JSON."""
    found = set()
    for process in service.status()["processes"]:
        for line in Path(process["log"]).read_text(encoding="utf-8").splitlines():
            if json.loads(line).get("request_id") == request_id:
                found.add(process["kind"])
    return found
