"""An encoder in processes of its own: its vectors, also those that a worker was computing when it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx2 as httpx
import numpy as np
import torch

from tests.gpu_worker.encoder_models import add_tokenizer, make_encoder
from tests.integration.service import Service

TEXTS = [f"{'the river floods ' * (number % 3)}in spring {number}" for number in range(40)]


async def test_the_death_of_a_worker_changes_no_vector(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make_encoder(folder, "Bert")
    tokenizer = add_tokenizer(folder, "Bert")
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
    wanted = np.array(states) / np.linalg.norm(states, axis=-1, keepdims=True)
    service = Service.start(tmp_path / "run", "--model", str(folder), "--workers", "2")
    try:
        first = service.processes("gpu_worker")[0]["pid"]
        (router,) = service.processes("router")
        async with httpx.AsyncClient(base_url=f"http://{router['addresses']['http']}", timeout=240) as http:

            async def embed(text: str) -> list[float]:
                answer = (await http.post("/v1/embeddings", json={"input": text})).raise_for_status().json()
                vector: list[float] = answer["data"][0]["embedding"]
                return vector

            os.kill(first, signal.SIGSTOP)
            running = [asyncio.create_task(embed(text)) for text in TEXTS]
            # The other worker answers; what was placed on the first one waits.
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            os.kill(first, signal.SIGKILL)
            found = np.array(await asyncio.gather(*running))
            refused = await http.post("/v1/completions", json={"prompt": "a"})
    finally:
        service.stop()
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert ((found * wanted).sum(-1) > 0.99999).all()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
