"""A collector of OpenTelemetry traces and metrics over OTLP/gRPC that runs in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """A received span; times are Unix times in nanoseconds, ids are hexadecimal."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | list[str]]
    error: str
    is_error: bool
    events: list[str]
    kind: int


@dataclass(frozen=True)
class Values:
    """The number and the sum of the values recorded so far, for one set of attributes of a histogram."""

    attributes: dict[str, str]
    count: int
    sum: float


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the latest state of each histogram.

    Attributes:
        histograms: By the name of a histogram, its values for each set of attributes.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, list[Values]] = {}

    def Export(  # noqa: N802
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for metric in (item for r in request.resource_metrics for s in r.scope_metrics for item in s.metrics):
            self.histograms[metric.name] = [
                Values({item.key: item.value.string_value for item in point.attributes}, point.count, point.sum)
                for point in metric.histogram.data_points
            ]
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Collector(pb_grpc.TraceServiceServicer):
    """Collects all received spans.

    Attributes:
        metrics: The received metrics.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._has_news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        self.metrics = Metrics()
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self.metrics, self._server)  # type: ignore[no-untyped-call]
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._has_news:
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans.extend(_span(names["service.name"], item) for item in scope.spans)
            self._has_news.notify_all()
        return pb.ExportTraceServiceResponse()

    def spans(self, trace_id: str) -> list[Span]:
        """Return the spans received so far, ordered by time."""
        with self._has_news:
            found = [span for span in self._spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)

    def all_spans(self) -> list[Span]:
        """Return all spans received so far."""
        with self._has_news:
            return list(self._spans)

    def await_spans(
        self, trace_id: str, is_whole: Callable[[Sequence[Span]], bool], timeout_s: float = 60
    ) -> list[Span]:
        """Return the trace once it is complete or the time limit is reached."""
        deadline = time.monotonic() + timeout_s
        while not is_whole(found := self.spans(trace_id)) and time.monotonic() < deadline:
            with self._has_news:
                self._has_news.wait(0.1)
        return found

    def stop(self) -> None:
        self._server.stop(0).wait()


def _span(service: str, item: trace_pb2.Span) -> Span:
    values = {entry.key: _value(entry.value) for entry in item.attributes}
    return Span(
        service,
        item.name,
        item.trace_id.hex(),
        item.span_id.hex(),
        item.parent_span_id.hex(),
        item.start_time_unix_nano,
        item.end_time_unix_nano,
        values,
        item.status.message,
        item.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        [event.name for event in item.events],
        item.kind,
    )


def _value(value: common_pb2.AnyValue) -> str | int | float | list[str]:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [entry.string_value for entry in value.array_value.values]
    found: str | int | float = getattr(value, str(kind))
    return found
