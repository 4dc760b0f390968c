"""Whether and when the official SDKs repeat a call that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from midstream.errors import (
    AlreadyExistsError,
    DeadlineError,
    ExecutionError,
    MidstreamError,
    OverloadedError,
    UnavailableError,
)
from router.protocols.anthropic.app import refuse
from router.protocols.http_server import HttpPort
from router.protocols.retries import retry_headers

Call = Callable[[], Awaitable[object]]


class Failing:
    """Refuses each call with `error`, in the format of the API that is called."""

    def __init__(self) -> None:
        self.error: MidstreamError = ExecutionError("")
        self.times: list[float] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.times.append(asyncio.get_running_loop().time())
        await refuse(self.error, scope, receive, send)


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture(params=["openai", "anthropic"])
async def call(request: pytest.FixtureRequest, failing: Failing) -> AsyncIterator[Call]:
    """Return a call of an SDK that repeats it up to two times, as by default."""
    port = HttpPort(failing, "127.0.0.1", 0)
    port.start()
    url = f"http://127.0.0.1:{port.port}"
    if request.param == "openai":
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-") as client:
            yield lambda: client.completions.create(model="", prompt="hi")
    else:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="-") as other:
            turns: Any = [{"role": "user", "content": "hi"}]
            yield lambda: other.messages.create(model="", max_tokens=9, messages=turns)
    await port.stop(0)


@pytest.mark.parametrize("error", [ExecutionError("no"), DeadlineError("no"), AlreadyExistsError("no")])
async def test_a_call_is_not_repeated_if_that_cannot_help(call: Call, failing: Failing, error: MidstreamError) -> None:
    failing.error = error
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        await call()
    assert len(failing.times) == 1


@pytest.mark.parametrize(
    ("error", "wait_s"), [(UnavailableError("no"), 2), (OverloadedError("no", retry_after_ms=1200), 1.2)]
)
async def test_a_call_is_repeated_after_the_given_time(
    call: Call, failing: Failing, error: MidstreamError, wait_s: float
) -> None:
    failing.error = error
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        await call()
    first, second, third = failing.times
    assert min(second - first, third - second) >= wait_s


def test_no_client_is_told_to_wait_for_a_minute() -> None:
    assert retry_headers(OverloadedError("no", retry_after_ms=600_000)) == {
        "retry-after": "59",
        "retry-after-ms": "59000",
    }
    assert retry_headers(OverloadedError("no", retry_after_ms=50)) == {"retry-after": "1", "retry-after-ms": "50"}
