"""The ledger as read over HTTP."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from tests.router.conftest import Cluster


async def test_entries_come_in_pages(cluster: Cluster) -> None:
    router = await cluster.add_router()
    assert router.http is not None
    url = f"http://127.0.0.1:{router.http.port}/ledger"

    async def get(query: str) -> Any:
        def fetch() -> Any:
            with urllib.request.urlopen(url + query) as answer:
                return json.load(answer)

        return await asyncio.to_thread(fetch)

    first = await get("")
    (entry,) = first["data"]
    assert (entry["request_id"], entry["client_id"], entry["completion_tokens"]) == ("a", "c", 3)
    assert int(entry["finished_unix_ns"]) == 1 << 60
    assert (await get(f"?after={first['next_after']}")) == {"object": "list", "data": [], "next_after": None}
