"""Official clients for a router in the test's own process."""

from __future__ import annotations

import openai

from tests.router.conftest import Part


def client_of(router: Part) -> openai.AsyncOpenAI:
    """Return OpenAI's client, without retries."""
    assert router.http is not None
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.http.port}/v1", api_key="none", max_retries=0)
