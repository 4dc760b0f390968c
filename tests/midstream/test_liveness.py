from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from midstream.rpc.health import Progress
from midstream.telemetry import HttpServer, Metrics


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def address(progress: Progress) -> Iterator[str]:
    server = HttpServer(
        "127.0.0.1",
        0,
        Metrics(),
        progress.problems,
        progress.stalled,
        lambda: [problem for problem in progress.problems() if problem != "standby"],
    )
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=240) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_standby_is_alive_and_ready_but_not_healthy(progress: Progress, address: str) -> None:
    def pages() -> list[int]:
        return [status(address + page) for page in ("/health", "/live", "/ready")]

    progress.set_reason("standby", stands=True)
    assert pages() == [503, 200, 200]
    progress.set_reason("draining", stands=True)
    assert pages() == [503, 200, 503]
    progress.set_reason("draining", stands=False)
    progress.set_reason("standby", stands=False)
    assert pages() == [200, 200, 200]


def test_a_service_whose_loop_hangs_is_neither_ready_nor_alive(progress: Progress, address: str) -> None:
    loop = progress.loop("loop", timeout_s=-1)  # any work in progress exceeds this timeout
    loop.touch()
    assert (status(address + "/health"), status(address + "/live")) == (503, 503)
    loop.idle()
    assert (status(address + "/health"), status(address + "/live")) == (200, 200)
