from __future__ import annotations

import subprocess
import sys

import pytest

from midstream.config import RouterConfig
from midstream.errors import ConfigError
from midstream.telemetry.tracing import TraceParent, Tracer, new_trace

# This is the example in the W3C recommendation.
TEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_headers_have_the_w3c_format() -> None:
    parent = TraceParent.parse(TEXT)
    assert parent == TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_sampled=True)
    assert str(parent) == TEXT
    unsampled = TraceParent.parse(TEXT[:-2] + "00")
    assert unsampled is not None
    assert not unsampled.is_sampled
    # Later versions may append fields; the known fields are still read.
    assert TraceParent.parse("cc" + TEXT[2:] + "-what-comes-next") == parent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        TEXT[:-1],
        TEXT + "-more",
        " " + TEXT,
        TEXT + "\n",
        TEXT.upper(),
        "ff" + TEXT[2:],
        TEXT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        TEXT.replace("00f067aa0ba902b7", "0" * 16),
    ],
)
def test_malformed_headers_are_ignored(text: str) -> None:
    assert TraceParent.parse(text) is None
    assert TraceParent.sampled(text) is None


def test_only_sampled_requests_are_traced() -> None:
    assert TraceParent.sampled(TEXT) == TraceParent.parse(TEXT)
    assert TraceParent.sampled(TEXT[:-2] + "00") is None
    assert not new_trace(is_sampled=False).new_child().is_sampled


def test_every_part_knows_the_schedulers_span() -> None:
    router = new_trace(is_sampled=True)
    again = TraceParent.parse(str(router))
    assert again is not None
    assert router.scheduler_span() == again.scheduler_span()
    assert router.scheduler_span().trace_id == router.trace_id
    assert router.scheduler_span().span_id != router.span_id
    assert router.scheduler_span() != router.new_child().scheduler_span()


def test_opentelemetry_is_not_imported_without_tracing() -> None:
    program = (
        "import sys, router.__main__, scheduler.service, detokenizer.__main__\n"
        "from midstream.config import RouterConfig\n"
        "from midstream.telemetry.tracing import Tracer\n"
        "assert Tracer.from_config(RouterConfig(), 'router') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_a_collector_has_an_address() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        Tracer.from_config(RouterConfig(otlp_endpoint="collector:4317"), "router")
