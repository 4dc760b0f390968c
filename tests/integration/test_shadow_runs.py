"""Recorded requests run on candidates: the same weights give the same answers, others differ where they say."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from midstream.client import AsyncClient
from midstream.receipts.evidence import Evidence
from midstream.receipts.shadow import Shadow
from protos import generation_pb2 as pb
from tests.integration.service import Service, chat, midstream

REQUESTS = {
    "greedy": chat("Name a river.", max_tokens=12, sampling=pb.SamplingConfig(temperature=0.0)),
    "sampled": chat("Name two rivers.", max_tokens=20, sampling=pb.SamplingConfig(temperature=0.9, seed=4)),
    "two sequences": chat(
        "Name a lake.", max_tokens=8, sampling=pb.SamplingConfig(temperature=0.9, seed=5, num_return_sequences=2)
    ),
    "beams": chat("Name a sea.", max_tokens=8, sampling=pb.SamplingConfig(beam_width=2)),
}


async def recorded(client: AsyncClient) -> list[Evidence]:
    found = []
    for request in REQUESTS.values():
        asked = pb.GenerateRequest()
        asked.CopyFrom(request)
        result = await client.stream(asked).result()
        found.append(await client.receipt(result.request_id, include_request=True, include_outputs=True))
    return found


async def write(service: Service, path: Path) -> None:
    async with AsyncClient(service.routers()) as client:
        lines = [json.dumps(evidence.to_json()) for evidence in await recorded(client)]
    await asyncio.to_thread(path.write_text, "\n".join(lines), encoding="utf-8")


async def test_the_same_weights_give_equal_answers_and_log_probabilities(service: Service, tmp_path: Path) -> None:
    file, here = tmp_path / "requests.jsonl", ("--run-dir", str(service.run_dir))
    await write(service, file)
    found = midstream(
        "replay", str(file), "--shadow", service.routers()[0], *here, "--min-equal", "1", "--max-distance", "0"
    )
    assert found.returncode == 0, found.stderr
    assert "4 of 4 answers are equal" in found.stdout
    assert "mean 0.00e+00" in found.stdout


async def test_log_probabilities_are_those_of_the_recorded_tokens(service: Service) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(values=[300, 301, 302]),
        max_tokens=5,
        sampling=pb.SamplingConfig(temperature=0.0),
        output=pb.OutputConfig(log_probs=0),
    )
    async with AsyncClient(service.routers()) as client:
        result = await client.stream(request).result()
        extras = result.sequences[0].extras
        assert extras is not None
        assert extras.log_probs is not None
        evidence = await client.receipt(result.request_id, include_request=True, include_outputs=True)
        finding = await Shadow(client, client).compare(evidence)
    # One step at a time, and as a prompt.
    assert finding.log_probs == pytest.approx(extras.log_probs.token_log_probs, abs=1e-5)
    assert finding.distances == [0.0] * 5


async def test_the_first_different_token_is_found(service: Service) -> None:
    async with AsyncClient(service.routers()) as client:
        evidence = (await recorded(client))[0]
        assert evidence.outputs is not None
        tokens = [*evidence.outputs[0]]
        was, tokens[7] = tokens[7], tokens[7] + 1
        finding = await Shadow(client).compare(Evidence(evidence.receipt, evidence.request, [tokens]))
        assert (finding.sequence, finding.token, finding.expected, finding.found) == (0, 7, was + 1, was)
        assert finding.distances == []
        finding = await Shadow(client).compare(Evidence(evidence.receipt))
        assert finding.reason.startswith("request and output are unknown")


async def test_a_model_is_served_meanwhile(service: Service, tmp_path: Path) -> None:
    file, here = tmp_path / "requests.jsonl", ("--run-dir", str(service.run_dir))
    await write(service, file)
    candidate = ("--shadow", "smollm2", "--shadow-setting", "weights=q4", *here)
    found = midstream("replay", str(file), *candidate, "--max-distance", "0.01", "--json")
    assert found.returncode == 3, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    distances = [distance for line in lines for distance in line["distances"]]
    assert 0.01 < math.fsum(distances) / len(distances) < 1.0
    assert sum(line["num_tokens"] for line in lines) == len(distances)


async def test_what_cannot_be_compared_is_said(service: Service, tmp_path: Path) -> None:
    file, here = tmp_path / "requests.jsonl", ("--run-dir", str(service.run_dir))
    await write(service, file)
    found = midstream("replay", str(file), "--shadow", service.routers()[0], "--shadow-setting", "weights=q4", *here)
    assert (found.returncode, "this service is running already" in found.stderr) == (2, True)
    found = midstream("replay", str(tmp_path / "absent"), "--shadow", service.routers()[0], *here)
    assert (found.returncode, "cannot be read" in found.stderr) == (2, True)
