"""A router's span and metrics have the names of OpenTelemetry's semantic conventions, whose package defines them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from midstream.client import AsyncClient, SamplingParams
from midstream.config import RouterConfig
from midstream.errors import NotFoundError
from midstream.telemetry.tracing import Tracer
from protos import generation_pb2 as pb
from router.pipeline.gen_ai_metrics import GenAiMetrics
from router.pipeline.request_traces import RequestTraces
from tests.integration.collector import Collector, Span
from tests.router.adapters.clients import client_of
from tests.router.client_streams import PROMPT
from tests.router.conftest import Cluster

NAMES = {getattr(gen_ai_attributes, name) for name in dir(gen_ai_attributes) if name.startswith("GEN_AI_")}


class Telemetry:
    """A collector, and a router that sends to it."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.tracer = Tracer(self.collector.endpoint, "router", "")
        gen_ai = GenAiMetrics.from_config(RouterConfig(otlp_endpoint=self.collector.endpoint), "smollm2")
        assert gen_ai is not None
        self.gen_ai = gen_ai

    async def close(self) -> dict[str, Span]:
        """Return the received spans, by request id."""
        await asyncio.to_thread(self.tracer.close)
        await asyncio.to_thread(self.gen_ai.close)
        self.collector.stop()
        return {str(span.attributes["midstream.request_id"]): span for span in self.collector.all_spans()}


@pytest.fixture
async def telemetry() -> Telemetry:
    return Telemetry()


async def test_spans_are_named_and_described_as_the_conventions_say(cluster: Cluster, telemetry: Telemetry) -> None:
    traces = RequestTraces(telemetry.tracer, 1.0, "smollm2")
    router = await cluster.add_router(await cluster.add_detokenizer(), traces=traces, gen_ai=telemetry.gen_ai)
    async with AsyncClient(router.address) as client:
        sampling = SamplingParams(max_tokens=9, temperature=0.5, seed=3, num_return_sequences=2)
        stream = client.generate(messages=[{"role": "user", "content": "hi"}], request_id="two", sampling=sampling)
        reading = asyncio.create_task(stream.result())
        await cluster.scheduler.until(lambda: "two" in cluster.scheduler.requests)
        for index in range(2):
            cluster.scheduler.emit("two", [20, 21], index)
        cluster.scheduler.end("two", pb.FINISH_REASON_STOP, sequences=[1])
        cluster.scheduler.end("two", pb.FINISH_REASON_LENGTH, sequences=[0])
        await reading
        left = asyncio.create_task(anext(client.generate(token_ids=PROMPT, request_id="left")))
        await cluster.scheduler.until(lambda: "left" in cluster.scheduler.requests)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await cluster.scheduler.until(lambda: "left" in cluster.scheduler.aborts)
        with pytest.raises(NotFoundError):
            await client.generate("hi", model="other", request_id="none").result()
    spans = await telemetry.close()
    two = spans["two"]
    assert (two.name, two.kind, two.is_error) == ("chat smollm2", trace_pb2.Span.SPAN_KIND_SERVER, False)
    expected = {
        gen_ai_attributes.GEN_AI_OPERATION_NAME: gen_ai_attributes.GenAiOperationNameValues.CHAT.value,
        gen_ai_attributes.GEN_AI_PROVIDER_NAME: "midstream",
        gen_ai_attributes.GEN_AI_REQUEST_MODEL: "smollm2",
        gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS: 9,
        gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        gen_ai_attributes.GEN_AI_REQUEST_SEED: 3,
        gen_ai_attributes.GEN_AI_REQUEST_CHOICE_COUNT: 2,
        gen_ai_attributes.GEN_AI_RESPONSE_MODEL: "smollm2",
        gen_ai_attributes.GEN_AI_RESPONSE_ID: "two",
        gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS: ["length", "stop"],
        gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS: 4,
    }
    assert expected.items() <= two.attributes.items()
    # Only a failure is an error: a client may leave at any time.
    left_span = spans["left"]
    assert (left_span.name, left_span.is_error) == ("text_completion smollm2", False)
    assert left_span.events[-1] == "the client left"
    assert error_attributes.ERROR_TYPE not in left_span.attributes
    none = spans["none"]
    assert (none.name, none.is_error) == ("text_completion other", True)
    assert none.attributes[error_attributes.ERROR_TYPE] == "NotFoundError"
    for span in spans.values():
        assert {name for name in span.attributes if name.startswith("gen_ai.")} <= NAMES


async def test_early_failures_have_a_duration(cluster: Cluster, telemetry: Telemetry) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer(), gen_ai=telemetry.gen_ai)
    messages: Any = [{"role": "user", "content": "hi"}]
    async with AsyncClient(router.address) as client, client_of(router) as http:
        with pytest.raises(NotFoundError):
            await client.generate("hi", model="other").result()
        with pytest.raises(NotFoundError):
            await client.embed("hi", model="other")
        with pytest.raises(openai.NotFoundError):
            await http.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await http.completions.create(model="smollm2", prompt="hi", top_p=7)
        with pytest.raises(openai.BadRequestError):
            await http.responses.create(model="smollm2", input="hi", top_p=7)
        with pytest.raises(openai.BadRequestError):
            await http.embeddings.create(model="smollm2", input="hi", dimensions=-1)
    await telemetry.close()
    points = telemetry.collector.metrics.histograms[gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION]
    found = {
        (point.attributes["gen_ai.operation.name"], point.attributes["error.type"]): point.count for point in points
    }
    assert found == {
        ("text_completion", "NotFoundError"): 1,
        ("embeddings", "NotFoundError"): 1,
        ("embeddings", "InvalidArgumentError"): 1,
        ("chat", "NotFoundError"): 1,
        ("text_completion", "InvalidArgumentError"): 1,
        ("chat", "InvalidArgumentError"): 1,
    }
