"""Logs with the request id, Prometheus metrics, and the HTTP port for metrics and health.

The HTTP server runs in a separate thread, so `/health` and `/metrics` respond even while the event loop hangs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from midstream.python_process import PARTS
from midstream.security.host_header import AllowedHosts

PREFIX = "midstream:"
ALIAS_PREFIX = "vllm:"
# Metrics that gateways and autoscalers expect under vLLM's names.
ALIASED = frozenset(
    PREFIX + name
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_success",
        "num_preemptions",
        "lora_requests_info",
    )
)
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Id of the request for which the current task works; every log line includes it.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
# The X-Request-Id that the client or a proxy gave the HTTP call; empty if there is none.
current_outer_id: ContextVar[str] = ContextVar("current_outer_id", default="")

# Name of the current part of a process that hosts several parts; empty if it hosts one.
current_part: ContextVar[str] = ContextVar("current_part", default="")

# The loggers that follow the configured level; `__main__` is the module that the process runs.
_OWN_LOGGERS = ("__main__", "midstream", *PARTS)

_PLAIN_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line: time, level, service, logger, message, request_id, x_request_id (the id that the
    client gave the HTTP call), and the `extra` fields.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": current_part.get() or self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id:
            line["request_id"] = request_id
        outer_id = current_outer_id.get()
        if outer_id:
            line["x_request_id"] = outer_id
        line.update({key: value for key, value in vars(record).items() if key not in _PLAIN_RECORD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Human-readable log lines. Control characters are escaped, since clients choose request ids and parts of messages:
    they could otherwise forge log lines, or control the terminal.
    """

    def __init__(self, service: str) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(service)s %(message)s%(request)s", "%H:%M:%S")
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        record.service = current_part.get() or self._service
        request_id = current_request_id.get()
        record.request = f" [{_escape(request_id)}]" if request_id else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base class names it)
        record.message = _escape(record.message)
        return super().formatMessage(record)


def _escape(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def configure_logging(service: str, *, level: str = "info", style: str = "json") -> None:
    """Send the log records of this process to standard error.

    Args:
        service: Name of the process, which is in every line; lines of a part that shares the process have its name.
        level: Minimum level of Midstream's own records. Other libraries' records are logged from WARNING on: at lower
            levels they contain what they process, such as all headers of a call with its credentials (hpack).
        style: `json` or `text`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if style == "json" else TextFormatter(service))
    own_level = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own_level, logging.WARNING), handlers=[handler], force=True)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(own_level)


class TimeHistogram(Collector):
    """A histogram of times in seconds, observed by one thread.

    It holds plain numbers: prometheus_client's histogram takes a lock for each number that an observation changes.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        counts, sum_s, total, buckets = list(self._counts), self._sum_s, 0, []
        for bound, count in zip((*map(str, LATENCY_BUCKETS_S), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(self._name, self._text, buckets, sum_s)


class _KeptCounter(Collector):
    """A counter whose values are read at each scrape."""

    def __init__(self, name: str, text: str, counts: Mapping[str, Callable[[], float]], label: str) -> None:
        self._name, self._text, self._counts, self._label = name, text, counts, label

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family."""
        family = CounterMetricFamily(self._name, self._text, labels=(self._label,) if self._label else ())
        for value, count in self._counts.items():
            family.add_metric((value,) if self._label else (), count())
        yield family


class _ByModel(Collector):
    """The metrics of several models, each with the label `model_name`."""

    def __init__(self) -> None:
        self.parts: dict[str, CollectorRegistry] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all models."""
        families: dict[str, Metric] = {}
        for model, registry in self.parts.items():
            for family in registry.collect():
                whole = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                whole.samples += [
                    sample._replace(labels={"model_name": model} | sample.labels) for sample in family.samples
                ]
        yield from families.values()


class Metrics:
    """Prometheus metrics of the process, named `midstream:NAME`; those that gateways expect also have vLLM's names."""

    def __init__(self, model: str = "", whole: Metrics | None = None) -> None:
        """Create metrics of the process, or of a part of it, which are exported with those of `whole` until `drop`.

        Args:
            model: The label `model_name` of the metrics with vLLM's names.
        """
        self._model, self._whole = model, whole
        self._by_model: _ByModel | None = None
        self.registry = CollectorRegistry()
        if whole is None:
            ProcessCollector(registry=self.registry)
        else:
            whole.registry.register(self.registry)

    def of_model(self, model: str) -> Metrics:
        """Return metrics of one of several models, which are exported with these, with the label `model_name`."""
        if self._by_model is None:
            self._by_model = _ByModel()
            self.registry.register(self._by_model)
        part = Metrics(model, Metrics())
        self._by_model.parts[model] = part.registry
        return part

    def drop(self) -> None:
        """Export the metrics of this part no longer."""
        if self._whole is not None:
            self._whole.registry.unregister(self.registry)

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> PrometheusCounter:
        """Create a counter, exported as `midstream:NAME_total`."""
        return PrometheusCounter(PREFIX + name, text, labels, registry=self.registry)

    def counter_of(self, name: str, text: str, counts: Mapping[str, Callable[[], float]], label: str = "") -> None:
        """Export counts that are kept elsewhere as `midstream:NAME_total`: one for each value of `label`, or one."""
        self.registry.register(_KeptCounter(PREFIX + name, text, counts, label))

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str) -> TimeHistogram:
        """Create a histogram of times in seconds, which only one thread may change."""
        histogram = TimeHistogram(PREFIX + name, text)
        self.registry.register(histogram)
        return histogram

    def render(self) -> bytes:
        """Return the text to serve at `/metrics`."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Return all metric families; those with an alias are returned under both names."""
        for family in self.registry.collect():
            yield family
            if family.name in ALIASED:
                yield self._alias(family)

    def _alias(self, family: Metric) -> Metric:
        copy = Metric(family.name.replace(PREFIX, ALIAS_PREFIX, 1), family.documentation, family.type, family.unit)
        named = {"model_name": self._model} if self._model else {}
        copy.samples = [
            sample._replace(name=sample.name.replace(PREFIX, ALIAS_PREFIX, 1), labels=named | sample.labels)
            for sample in family.samples
        ]
        return copy


# A page returns (status, content type, body).
_MAX_THREADS = 128
_MAX_PER_ADDRESS = 32
Page = Callable[[], tuple[int, str, bytes]]


class _BoundedHTTPServer(ThreadingHTTPServer):
    """An HTTP server with one thread per connection, up to a limit in total and one per address; further connections
    are closed immediately.
    """

    request_queue_size = 1024  # the backlog; if it overflows, a probe is only answered after a second or more

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        self._num_open = Counter[str]()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        address = client_address[0]
        with self._lock:
            is_over = threading.active_count() > _MAX_THREADS or self._num_open[address] >= _MAX_PER_ADDRESS
            self._num_open[address] += 1
        if is_over:
            self._leave(address)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._leave(address)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(client_address[0])

    def _leave(self, address: str) -> None:
        with self._lock:
            self._num_open[address] -= 1
            if not self._num_open[address]:
                del self._num_open[address]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an exception of a handler; by default it would be printed between the log lines."""
        error = sys.exception()
        # The client may have disconnected without waiting for the response.
        level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
        logging.getLogger(__name__).log(level, "a page could not be served", exc_info=error)


class HttpServer:
    """Serves `/metrics`, `/health`, `/live` and `/ready` on a separate port, from a thread.

    `/health` returns 200 while `health()` is empty, otherwise 503. `/live` does the same with `stalled()`: a process
    that is not serving is alive, but a process with a stalled loop is not. `/ready` does the same with `not_ready()`,
    by default `health()`: a standby is ready but not serving.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        health: Callable[[], list[str]],
        stalled: Callable[[], list[str]] = list,
        not_ready: Callable[[], list[str]] | None = None,
    ) -> None:
        pages: Mapping[str, Page] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, metrics.render()),
            "/health": lambda: _health_page(health()),
            "/live": lambda: _health_page(stalled()),
            "/ready": lambda: _health_page((not_ready or health)()),
        }
        self._server = _BoundedHTTPServer((host, port), _handler_of(pages, AllowedHosts(host)))
        self._server.daemon_threads = True
        self._host = host
        self._server.timeout = 0.5  # seconds between checks whether to stop
        self.port: int = self._server.server_address[1]
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="telemetry-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port; this takes at most half a second."""
        self._is_stopping = True
        # A connection wakes the thread.
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), timeout=1).close()
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._is_stopping:
            self._server.handle_request()


def _health_page(stalled: list[str]) -> tuple[int, str, bytes]:
    body = {"status": "NOT_SERVING" if stalled else "SERVING", "stalled": stalled}
    return (503 if stalled else 200), "application/json", json.dumps(body).encode()


def _handler_of(pages: Mapping[str, Page], allowed: AllowedHosts) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds that a client may take to send its request

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, content_type, body = page() if page else (404, "text/plain", b"not found\n")
            if not allowed.include(self.headers.get("Host", "")):
                status, content_type, body = 421, "text/plain", b"this host name is not served here\n"
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Do nothing, so that probes and scrapes are not logged."""

    return Handler
