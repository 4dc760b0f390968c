"""Weights that change under running streams, with real processes that are killed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from safetensors.torch import load_file, save_file

from midstream.client import AsyncClient
from midstream.model.folder import open_model_folder
from midstream.model.weight_tree import hash_weights
from midstream.receipts.audit import Auditor, Verdict
from protos import generation_pb2 as pb
from protos import weights_pb2
from tests.faults.small_model import make_small_model
from tests.integration.service import eventually
from tests.integration.test_audit import LIES, lie
from tests.integration.test_kinds import Cell, Stream, run

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 150
NUM_REQUESTS = 4
WORKERS = ("worker-0", "worker-1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a model and of two others whose weights differ, all below one folder."""
    root = tmp_path_factory.mktemp("weights")
    (root / "base").mkdir()
    make_small_model(root / "base")
    for name, factor in (("one", 1.05), ("two", 0.95)):
        shutil.copytree(root / "base", root / name, ignore=shutil.ignore_patterns("midstream*.json"))
        weights = load_file(root / name / "model.safetensors")
        weights = {key: value * factor if "mlp" in key else value for key, value in weights.items()}
        save_file(weights, root / name / "model.safetensors", {"format": "pt"})
    other = root / "other"
    other.mkdir()
    make_small_model(other, num_hidden_layers=1)
    return {name: root / name for name in ("base", "one", "two", "other")}


@pytest.fixture
def cell(tmp_path: Path, folders: dict[str, Path]) -> Iterator[Cell]:
    cell = Cell(tmp_path, folders["base"])
    try:
        cell.start("scheduler")
        cell.start("detokenizer")
        cell.start("router", "--update-root", str(folders["base"].parent))
        for worker in WORKERS:
            start_worker(cell, worker)
        yield cell
    finally:
        cell.close()


def start_worker(cell: Cell, name: str) -> None:
    cell.start(name, "--update-root", str(cell.model.parent))


def request_of(number: int, name: str, given: list[int] | None = None) -> pb.GenerateRequest:
    """Return a request, of which every second one is greedy; with `given`, it continues after these tokens."""
    given = given or []
    return pb.GenerateRequest(
        request_id=f"{name}-{number}",
        token_ids=pb.TokenIds(values=[*range(300 + number, 340 + number), *given]),
        max_tokens=NUM_TOKENS - len(given),
        sampling=pb.SamplingConfig(temperature=0.9 if number % 2 else 0.0, seed=number),
        stopping=pb.StoppingConfig(ignore_eos=True),
        output=pb.OutputConfig(return_receipt=True),
    )


async def update(stub: Stub, folder: Path, **fields: str) -> weights_pb2.UpdateWeightsResponse:
    request = weights_pb2.UpdateWeightsRequest(path=str(folder), **fields)  # type: ignore[arg-type]
    return await stub.UpdateWeights(request, timeout=240)


async def state(stub: Stub) -> weights_pb2.CellWeights:
    (found,) = (await stub.GetWeightsVersion(weights_pb2.GetWeightsVersionRequest(), timeout=240)).cells
    return found


async def ready(stub: Stub, num_groups: int) -> weights_pb2.CellWeights:
    return await eventually(
        lambda: state(stub), lambda found: (found.num_groups, found.num_outdated_groups) == (num_groups, 0), 240
    )


async def check_parts(cell: Cell, streams: list[Stream], before: list[Stream], root: str) -> None:
    """Check that every token is that which its version gives after the tokens before it; the service has the last
    version.
    """
    async with cell.stub() as stub, AsyncClient([f"127.0.0.1:{cell.ports['router']}"]) as client:
        auditor = Auditor(client, {key.key_id: key for key in await client.receipt_keys()})
        liar = Auditor(client, LIES)
        await auditor.open()
        await liar.open()
        for number, (stream, old) in enumerate(zip(streams, before, strict=True)):
            assert len(stream.tokens) == NUM_TOKENS
            assert stream.changed_at is not None
            assert stream.final is not None
            first, last = stream.final.weights
            assert (first.from_token, first.version) == (0, "default")
            assert (last.from_token, last.version, last.weights_root) == (stream.changed_at, "step 1", root)
            assert stream.tokens[: stream.changed_at] == old.tokens[: stream.changed_at]
            if not number % 2:
                given = stream.tokens[: stream.changed_at]
                (again,) = await run(stub, [request_of(number, "again", given)])
                assert again.tokens == stream.tokens[stream.changed_at :]
            evidence = await client.receipt(f"live-{number}", include_request=True, include_outputs=True)
            finding = await auditor.audit(evidence)
            assert (finding.verdict, "the rest is proved" in finding.reason) == (Verdict.UNCHECKED, True), finding
            assert "recomputation" in finding.checked
            # A token that the new weights have not given is found.
            (tokens,) = evidence.outputs or [[]]
            place = stream.changed_at + 3
            false = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
            finding = await liar.audit(lie(evidence, [false]))
            assert (finding.verdict, finding.token) == (Verdict.DIFFERS, place), finding


async def check_first_part(cell: Cell, stream: Stream) -> None:
    """Check that an audit with the first weights proves the first tokens, and finds what they have not given."""
    assert stream.changed_at is not None
    async with AsyncClient([f"127.0.0.1:{cell.ports['router']}"]) as client:
        evidence = await client.receipt("live-0", include_request=True, include_outputs=True)
        (tokens,) = evidence.outputs or [[]]
        auditor, liar = Auditor(client, {key.key_id: key for key in await client.receipt_keys()}), Auditor(client, LIES)
        await auditor.open()
        await liar.open()
        finding = await auditor.audit(evidence)
        assert (finding.verdict, "the rest is proved" in finding.reason) == (Verdict.UNCHECKED, True), finding
        place = stream.changed_at - 1
        false = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
        finding = await liar.audit(lie(evidence, [false]))
        assert (finding.verdict, finding.token) == (Verdict.DIFFERS, place), finding


async def grown(streams: list[Stream], num_tokens: int) -> None:
    deadline = time.monotonic() + 240
    while not all(len(stream.tokens) >= num_tokens for stream in streams):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_streams_continue_under_new_weights_through_kills(cell: Cell, folders: dict[str, Path]) -> None:
    await cell.wait_for_workers(*WORKERS)
    async with cell.stub() as stub:
        before = await run(stub, [request_of(number, "base") for number in range(NUM_REQUESTS)])
        assert (await state(stub)).version.version == "default"
        streams = [Stream() for _ in range(NUM_REQUESTS)]
        reading = [
            asyncio.create_task(stream.read(stub, request_of(number, "live"))) for number, stream in enumerate(streams)
        ]
        await grown(streams, 10)
        # Pauses make sure that the streams are not complete yet.
        await stub.PauseGeneration(weights_pb2.PauseGenerationRequest(), timeout=240)
        root = hash_weights(open_model_folder(str(folders["one"])))
        response = await update(stub, folders["one"], version="step 1")
        assert (response.version.version, response.version.weights_root) == ("step 1", root)
        # A worker that is killed starts with the folder in its settings, and changes its weights before it gets work.
        cell.end("worker-0")
        start_worker(cell, "worker-0")
        await stub.ResumeGeneration(weights_pb2.ResumeGenerationRequest(), timeout=240)
        await asyncio.gather(*reading)
        assert all(stream.tokens != old.tokens for stream, old in zip(streams, before, strict=True))
        await ready(stub, 2)
        await check_parts(cell, streams, before, root)
        # The version outlives the scheduler and all workers.
        for name in ("scheduler", *WORKERS):
            cell.end(name)
        cell.start("scheduler")
        for worker in WORKERS:
            start_worker(cell, worker)
        await cell.wait_for_workers(*WORKERS)
        found = await ready(stub, 2)
        assert (found.version.version, found.version.weights_root) == ("step 1", root)
        (again,) = await run(stub, [request_of(0, "after all", streams[0].tokens[: streams[0].changed_at])])
        assert again.tokens == streams[0].tokens[streams[0].changed_at :]
        # And the served model's own folder is always allowed.
        await update(stub, folders["base"])
        await ready(stub, 2)
        (again,) = await run(stub, [request_of(0, "back")])
        assert again.tokens == before[0].tokens
        await check_first_part(cell, streams[0])


async def test_a_refused_update_changes_nothing_and_says_why(cell: Cell, folders: dict[str, Path]) -> None:
    await cell.wait_for_workers(*WORKERS)
    async with cell.stub() as stub:
        for path, reason in (
            (folders["other"], "num_layers differs"),
            (folders["base"].parent / "none", "not a folder"),
            (Path("/etc"), "--update-root"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await update(stub, path)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason in (failure.value.details() or "")
        found = await ready(stub, 2)
        assert found.version.version == "default"


async def test_a_worker_killed_while_it_loads_leaves_the_old_weights(cell: Cell, folders: dict[str, Path]) -> None:
    await cell.wait_for_workers(*WORKERS)
    async with cell.stub() as stub:
        # A worker that stands still does not answer, so that it is certain to be killed before.
        cell.send("worker-1", signal.SIGSTOP)
        updating = asyncio.create_task(update(stub, folders["two"]))

        async def log() -> str:
            return cell.log("worker-0")

        await eventually(log, lambda text: "prepared weights" in text, 240)
        cell.end("worker-1")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await updating
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        start_worker(cell, "worker-1")
        assert (await ready(stub, 2)).version.version == "default"


async def test_a_pause_stops_all_tokens_and_loses_none(cell: Cell) -> None:
    await cell.wait_for_workers(*WORKERS)
    async with cell.stub() as stub:
        before = await run(stub, [request_of(number, "base") for number in range(NUM_REQUESTS)])
        for mode in (weights_pb2.PAUSE_MODE_KEEP, weights_pb2.PAUSE_MODE_RECOMPUTE):
            streams = [Stream() for _ in range(NUM_REQUESTS)]
            reading = [
                asyncio.create_task(stream.read(stub, request_of(number, f"pause {mode}")))
                for number, stream in enumerate(streams)
            ]
            await grown(streams, 10)
            await stub.PauseGeneration(weights_pb2.PauseGenerationRequest(mode=mode), timeout=240)
            assert (await state(stub)).is_paused
            late = asyncio.create_task(Stream().read(stub, request_of(0, f"late {mode}")))
            assert not (await asyncio.wait((late,), timeout=0.5))[0]
            await stub.ResumeGeneration(weights_pb2.ResumeGenerationRequest(), timeout=240)
            await asyncio.gather(*reading)
            assert [stream.tokens for stream in streams] == [stream.tokens for stream in before]
            assert (await late).tokens == before[0].tokens
