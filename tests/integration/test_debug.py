"""The state at a token of a recorded request is the state in which it was chosen, bit for bit."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.cli.debug import run as run_debug
from midstream.client import AsyncClient
from midstream.client.result import Result
from midstream.errors import InvalidArgumentError, NotFoundError, ReceiptError, UnsupportedError
from midstream.receipts.evidence import Evidence
from midstream.receipts.token_state import Debugger, TokenState
from protos import generation_pb2 as pb
from protos.receipts_pb2 import ReceiptBody
from tests.integration.service import Service, chat, midstream
from tests.integration.test_audit import KINDS
from tests.scheduler.test_recording import live

TRACED = pb.OutputConfig(additional_outputs=[pb.AdditionalOutput(name="sampling.6")], return_receipt=True)
NUM_TOKENS = 16


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.routers()) as client:
        yield client


async def traced(client: AsyncClient, name: str) -> tuple[Evidence, Result]:
    """Run a request that reports how each of its tokens is chosen."""
    request = chat(f"Write about hills ({name}).", max_tokens=NUM_TOKENS, **KINDS[name] | {"output": TRACED})
    result = await client.stream(request).result()
    assert result.receipt is not None
    known = await client.receipt(result.request_id, include_request=True, include_outputs=True)
    return Evidence(result.receipt, known.request, known.outputs), result


def bits(state: TokenState) -> bytes:
    """Return the parts of `sampling.6` and its draw in one string of bytes."""
    number = float("nan") if state.random_number is None else state.random_number
    draw = struct.pack("<3d3f2i", number, state.begin, state.end, state.temperature, state.top_p, state.least,
                       state.num_allowed, state.num_drawable)  # fmt: skip
    items = (state.chosen, *state.top)
    about = b"".join(struct.pack("<4f", i.logit, i.steered, i.masked, i.probability) for i in items)
    return struct.pack("<7i", *(item.token for item in items)) + about + draw


@pytest.mark.parametrize("name", ["sampled", "two sequences", "penalties", "grammar", "post-processor"])
async def test_the_state_is_that_of_the_run(client: AsyncClient, name: str) -> None:
    evidence, result = await traced(client, name)
    debugger = Debugger(client)
    for sequence, found in enumerate(result.sequences):
        parts = [found.tensors[f"sampling.6{end}"] for end in (".ids", "", ".draw")]
        for index in (0, 9, len(found.token_ids) - 1):
            state = await debugger.state(evidence, index, sequence=sequence, num_top=6)
            widths = [4 * part.shape[1] for part in parts]
            rows = [part.data[index * width :][:width] for part, width in zip(parts, widths, strict=True)]
            assert bits(state) == b"".join(rows)
            assert state.is_as_recorded
            assert state.chosen.token == state.recorded == found.token_ids[index]
            assert state.difference == ""
            assert (state.num_allowed < 49_152) == (name == "grammar")


async def test_what_cannot_be_debugged(client: AsyncClient) -> None:
    evidence, _ = await traced(client, "greedy")
    debugger = Debugger(client)
    assert (await debugger.state(evidence, NUM_TOKENS)).recorded is None
    with pytest.raises(InvalidArgumentError, match="at_token"):
        await debugger.state(evidence, NUM_TOKENS + 1)
    with pytest.raises(InvalidArgumentError, match="sequence"):
        await debugger.state(evidence, 0, sequence=1)
    with pytest.raises(NotFoundError, match="--receipts payload"):
        await debugger.state(Evidence(evidence.receipt, evidence.request), 0)
    assert evidence.outputs is not None
    with pytest.raises(ReceiptError, match="tokens 0 to 15"):
        await debugger.state(Evidence(evidence.receipt, evidence.request, [[1, *evidence.outputs[0][1:]]]), 0)
    request = chat("Beams.", max_tokens=3, **KINDS["beams"])
    result = await client.stream(request).result()
    with pytest.raises(UnsupportedError, match="beam search"):
        await debugger.state(await debugger.find(result.request_id), 1)


async def test_a_state_costs_as_much_as_the_prompt_up_to_it(service: Service, client: AsyncClient) -> None:
    """In processor time, which other programs on the machine affect little."""
    workers = service.processes("gpu_worker")
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def used_s() -> float:
        stats = (Path(f"/proc/{worker['pid']}/stat").read_text() for worker in workers)
        fields = [stat.rpartition(")")[2].split() for stat in stats]
        return sum(int(item[11]) + int(item[12]) for item in fields) * tick_s

    ids = pb.TokenIds(values=range(1000, 1997))
    request = pb.GenerateRequest(token_ids=ids, max_tokens=3, sampling=pb.SamplingConfig(seed=4))
    request.stopping.ignore_eos = True
    start = used_s()
    result = await client.stream(request).result()
    prompt_s = used_s() - start
    debugger = Debugger(client)
    evidence = await debugger.find(result.request_id)
    start = used_s()
    assert (await debugger.state(evidence, 2)).is_as_recorded
    assert used_s() - start <= 1.4 * prompt_s


async def test_the_command(service: Service, client: AsyncClient, tmp_path: Path) -> None:
    """The service still has request and output; the recording is of another request."""
    live(tmp_path / "recording")
    evidence, _ = await traced(client, "sampled")
    body = ReceiptBody.FromString(evidence.receipt.body)
    file = tmp_path / "evidence.jsonl"

    def debug(*flags: str) -> subprocess.CompletedProcess[str]:
        return midstream("debug", body.request_id, "--at-token", "7", "--run-dir", str(service.run_dir), *flags)

    assert evidence.outputs is not None
    recorded = evidence.outputs[0][7]
    done = await asyncio.to_thread(debug, "--json", "--top", "3", "--recording", str(tmp_path / "recording"))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["is_as_recorded"], found["recorded"], found["chosen"]["token"]) == (True, recorded, recorded)
    assert len(found["top"]) == 3
    assert (found["recording"]["step"], found["recording"]["difference"]) == (None, "")
    file.write_text(json.dumps(evidence.to_json()))
    done = await asyncio.to_thread(debug, "--evidence", str(file), "--model", "smollm2")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"token 7 of sequence 0 of {body.request_id}, at position" in done.stdout
    assert "as recorded" in done.stdout
    assert "random number 0." in done.stdout
    with pytest.raises(InvalidArgumentError, match="top: is 2000"):
        run_debug(argparse.Namespace(top=2000))
