"""OpenTelemetry's metrics of generative AI servers, sent to the collector that also receives the traces.

OpenTelemetry is imported only if a collector is set. Values are recorded once per request, when it ends.
"""

from __future__ import annotations

import os
import threading

import midstream
from midstream.config import RouterConfig
from midstream.errors import ConfigError

_SEND_TIMEOUT_S, _CLOSE_TIMEOUT_S = 3.0, 5.0
# The boundaries that OpenTelemetry's semantic conventions recommend, in seconds.
_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKENS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class GenAiMetrics:
    """Histograms of request duration, time to first token and time per output token. A background thread sends them
    once a minute; losing the collector affects nothing else.
    """

    def __init__(self, endpoint: str, instance: str, model: str) -> None:
        """Prepare the connection to an OTLP/gRPC collector. Raises ConfigError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            reason = f"needs `pip install midstream[tracing]` ({error})"
            raise ConfigError(reason, field="otlp_endpoint") from None
        exporter = OTLPMetricExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_SEND_TIMEOUT_S)
        resource = Resource.create({"service.name": "midstream-router", "service.instance.id": instance or "router"})
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)],
            resource,
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("midstream", midstream.__version__)
        self._duration, self._first_token, self._per_token = (
            meter.create_histogram(f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=bounds)
            for name, text, bounds in (
                ("request.duration", "Time from arrival to last output.", _DURATIONS),
                ("time_to_first_token", "Time from arrival to first output.", _FIRST_TOKENS),
                ("time_per_output_token", "Time per token after the first output.", _TOKENS),
            )
        )
        self._attributes = {"gen_ai.provider.name": "midstream", "gen_ai.request.model": model}

    @classmethod
    def from_config(cls, config: RouterConfig, model: str) -> GenAiMetrics | None:
        """Return the metrics; None if no collector is set, or metrics are disabled (OTEL_METRICS_EXPORTER=none)."""
        if not config.otlp_endpoint or os.environ.get("OTEL_METRICS_EXPORTER") == "none":
            return None
        return cls(config.otlp_endpoint, config.name, model)

    def record(
        self, operation: str, duration_s: float, first_s: float | None, per_token_s: float | None, error: str
    ) -> None:
        """Record a request that has ended.

        Args:
            operation: What was requested: `chat`, `text_completion` or `embeddings`.
            duration_s: Time from its arrival to its end.
            first_s: Time to its first output; None if there was none.
            per_token_s: Time per token after the first output; None if there were no further tokens.
            error: Why it failed; empty if it succeeded. For failed requests only the duration is recorded.
        """
        attributes = self._attributes | {"gen_ai.operation.name": operation}
        if error:
            self._duration.record(duration_s, attributes | {"error.type": error})
            return
        self._duration.record(duration_s, attributes)
        if first_s is not None:
            self._first_token.record(first_s, attributes)
        if per_token_s is not None:
            self._per_token.record(per_token_s, attributes)

    def close(self) -> None:
        """Send the remaining values; this takes at most a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="metrics-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
