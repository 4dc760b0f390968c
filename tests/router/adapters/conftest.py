"""A router with one detokenizer, and OpenAI's client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.router.adapters.clients import client_of
from tests.router.conftest import Cluster, Part


@pytest.fixture
async def router(cluster: Cluster) -> Part:
    return await cluster.add_router(await cluster.add_detokenizer())


@pytest.fixture
async def client(router: Part) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(router) as client:
        yield client
