"""One request of each kind, while a component is killed at each of its tokens. The output equals that of an undisturbed
run.

The kinds of component take turns: at each token, the next one is killed. Each request runs up to four times, starting
with a different kind each time, so that every kind is killed at every token. By default, only one of the four runs is
made, with 24 tokens. With TEST_ALL_KILLS=1 all of them are made, with 48 tokens, over frames and gRPC, and with
each layout of workers. TEST_KILL_MODEL=NAME runs the tests on a model of tests/gpu_worker/test_families.py.

Other models are tested with a few kills: by default one with recurrent state and one with a latent cache, and with
TEST_ALL_KILLS=1 nearly all models of tests/gpu_worker/test_families.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from gpu_worker.model_runner import ModelRunner
from midstream.client.result import Result
from midstream.model.folder import ModelFolder
from midstream.rpc import frames
from protos import generation_pb2 as pb
from tests.faults.forked_ranks import ForkedGroup
from tests.faults.in_process_service import KINDS, InProcessService, WorkerSettings
from tests.faults.small_model import make_small_model
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.test_families import MODELS
from tests.gpu_worker.tiny_models import make_runner

MODEL = os.environ.get("TEST_KILL_MODEL", "llama")
ROTATIONS = range(4) if os.environ.get("TEST_ALL_KILLS") else None
# Idefics 3 needs an image processor (tests/integration/test_images.py kills its workers), and `phi3_long` does not
# support sequences as long as these tests need.
LEFT_OUT = ("idefics3", "phi3_long")
# By default only one model with recurrent state, and one with a latent cache.
OTHER_MODELS = tuple(name for name in MODELS if name not in LEFT_OUT) if ROTATIONS else ("lfm2", "deepseek_v3")
NUM_TOKENS = 48 if ROTATIONS else 24
PROMPT = list(range(400, 437))
SEEDED = pb.SamplingConfig(
    temperature=0.8, top_k=40, seed=5, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
)
GREEDY = pb.SamplingConfig(temperature=0.0)
STOPS = ["never, never", "日日日", "ß本"]
# Kinds of request; add new request features here.
REQUESTS: dict[str, dict[str, object]] = {
    "greedy": {"sampling": GREEDY},
    "seeded, with penalties": {"sampling": SEEDED},
    "three sequences": {"sampling": pb.SamplingConfig(temperature=0.9, top_k=30, seed=9, num_return_sequences=3)},
    "stop words": {"sampling": SEEDED, "stopping": pb.StoppingConfig(stop_words=STOPS, ignore_eos=True)},
    "emoji and Chinese": {"sampling": pb.SamplingConfig(temperature=1.3, top_k=40, seed=3)},
    "beams with stop words": {
        "sampling": pb.SamplingConfig(beam_width=3, num_return_sequences=3),
        "stopping": pb.StoppingConfig(stop_words=["日", " the", "ing "]),
    },
    "guided": {
        "sampling": pb.SamplingConfig(temperature=1.0, seed=8),
        "guided_decoding": pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="([a-z]+ ){200}"),
    },
}
# How frame connections are opened, and layouts of the two workers: whether both have all roles or one only prefill,
# and where blocks are stored and moved.
ROUTES = ("directly", "within a call")
LAYOUTS = ("together", "tiers", "apart over TCP", "apart in shared memory")
# Settings of a group of two ranks that runs ahead. The limits are small, so that the warm-up steps are small.
GROUP_FLAGS = (
    *("--kernels", "torch", "--run-ahead", "on", "--num-threads", "1", "--max-batch-size", "1"),
    *("--max-num-tokens", "16", "--max-sequence-length", "96", "--max-kv-tokens", "96"),
)
RANKS = ((0,), (1,), (0, 1))
CHOSEN: dict[str, tuple[str, str]] = dict.fromkeys(REQUESTS, ("directly", "together")) | {
    "greedy": ("directly", "apart over TCP"),
    "seeded, with penalties": ("within a call", "together"),
    "three sequences": ("directly", "apart in shared memory"),
    "emoji and Chinese": ("directly", "tiers"),
}
CASES = [(kind, *CHOSEN[kind]) for kind in REQUESTS]
if ROTATIONS:
    CASES = [(kind, route, layout) for kind in REQUESTS for route in ROUTES for layout in LAYOUTS]


def settings_of(layout: str, folder: Path) -> WorkerSettings:
    """Return the settings of both workers; `folder` is private, for KV tiers and pools."""
    shared = {"shared_kv_folder": str(folder / "shared"), "host_kv_bytes": 1 << 24}
    disk = {"disk_kv_folder": str(folder / "disk")}
    if layout == "none":
        return {}
    if layout == "together":
        return {"one": {}, "two": {}}
    if layout == "tiers":
        return {"one": shared | disk, "two": shared | disk}
    kept = disk if layout == "apart over TCP" else shared
    return {"one": {"role": "prefill"} | kept, "two": {"role": "decode"} | kept}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    family, settings = MODELS[MODEL]
    return make_small_model(tmp_path_factory.mktemp("small"), family, **settings)


@pytest.fixture(scope="module")
def runner(folder: ModelFolder) -> Iterator[ModelRunner]:
    runner = make_runner(folder.path)
    yield runner
    runner.close()


@pytest.fixture
async def service(
    folder: ModelFolder, tmp_path: Path, route: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InProcessService]:
    gc.freeze()  # exempt imported modules from the garbage collections that stopping a component causes
    (tmp_path / "kv").mkdir(mode=0o700)
    if route == "within a call":
        monkeypatch.setattr(frames, "connect", AsyncMock(side_effect=ConnectionRefusedError("blocked")))
    service = InProcessService(folder, tmp_path / "journal", settings_of(layout, tmp_path / "kv"))
    await service.start()
    yield service
    await service.close()
    gc.unfreeze()


def request_of(kind: str, request_id: str) -> pb.GenerateRequest:
    fields = {"stopping": pb.StoppingConfig(ignore_eos=True)} | REQUESTS[kind]
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(values=PROMPT),
        max_tokens=NUM_TOKENS,
        **fields,  # type: ignore[arg-type]
    )


def output(result: Result) -> list[tuple[list[int], bytes, object, object]]:
    return [(s.token_ids, s.text.encode(), s.finish_reason, s.matched_stop) for s in result.sequences]


def alone(request: pb.GenerateRequest, runner: ModelRunner) -> list[list[int]]:
    """Return the tokens of a single worker without roles, tiers, kills and stop words."""
    made = pb.GenerateRequest.FromString(request.SerializeToString())
    made.request_id = "alone"
    return outputs(CoreWithRunners(runner, ()).run([made])[0])


@pytest.mark.parametrize(("kind", "route", "layout"), CASES)
async def test_the_output_is_identical_after_any_death_at_any_token(
    kind: str, route: str, layout: str, service: InProcessService, runner: ModelRunner
) -> None:
    expected = await service.run(request_of(kind, "undisturbed"), {})
    if "stop words" in kind:
        assert any(sequence.matched_stop for sequence in expected.sequences), expected.text
    else:
        assert len(expected.token_ids) == NUM_TOKENS
    for found, whole in zip(expected.sequences, alone(request_of(kind, ""), runner), strict=True):
        assert found.token_ids == whole[: len(found.token_ids)]
    for rotation in ROTATIONS or (list(REQUESTS).index(kind) % 4,):
        kills = {number: KINDS[(number + rotation) % 4] for number in range(NUM_TOKENS)}
        result = await service.run(request_of(kind, f"disturbed {rotation}"), kills, limit_s=100)
        assert output(result) == output(expected)
    # All tokens of the undisturbed run may have arrived together.
    assert service.num_streamed > len(expected.token_ids) // 2
    num_kills = len(expected.token_ids) * len(ROTATIONS or (0,))
    assert sum(service.num_kills.values()) >= num_kills
    assert (service.num_handovers > 0) == layout.startswith("apart")
    assert (service.gate.num_adopted > 0) == (layout != "together")
    print(kind, service.num_kills, expected.text)


@pytest.mark.parametrize("route", ["directly"])
@pytest.mark.parametrize("layout", ["none"])
@pytest.mark.parametrize("kind", ["seeded, with penalties"])
async def test_a_group_of_ranks_that_runs_ahead_dies_at_any_step(
    kind: str, service: InProcessService, folder: ModelFolder, runner: ModelRunner
) -> None:
    """One of the two ranks, or both, are killed when a step has just been sent, most often after another step whose
    tokens the scheduler does not know yet.

    By default this happens at three steps of the request, and with TEST_ALL_KILLS=1 at every step.
    """
    expected = alone(request_of(kind, ""), runner)
    group = ForkedGroup(folder.path, service.worker_address, 2, *GROUP_FLAGS)
    numbers = list(range(NUM_TOKENS) if ROTATIONS else (0, 10, 20))
    waiting = numbers.copy()
    restarts: list[asyncio.Task[None]] = []
    in_flight: list[int] = []

    def kill(num_tokens: int, num_in_flight: int) -> None:
        if waiting and num_tokens >= waiting[0]:
            while waiting and num_tokens >= waiting[0]:  # more than one result may have arrived since the last step
                waiting.pop(0)
            group.kill(RANKS[len(in_flight) % 3])
            in_flight.append(num_in_flight)
            restarts.append(asyncio.create_task(asyncio.to_thread(group.start)))

    try:
        service.after_steps(kill)
        result = await service.run(request_of(kind, "disturbed"), {}, limit_s=300)
        assert [item.token_ids for item in result.sequences] == expected
        assert len(in_flight) > 3 * len(numbers) // 4
        assert max(in_flight) == 2
    finally:
        await asyncio.gather(*restarts)
        group.close()


@pytest.mark.parametrize("name", OTHER_MODELS)
async def test_other_models_survive_the_death_of_each_part(name: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    small = make_small_model(tmp_path, family, **settings)
    request = request_of("seeded, with penalties", "undisturbed")
    request.max_tokens = 9
    runner = make_runner(small.path)
    expected = alone(request, runner)
    runner.close()
    service = InProcessService(small, tmp_path / "journal", settings_of("together", tmp_path))
    await service.start()
    result = await service.run(request, {number: KINDS[number % 4] for number in range(1, 9)})
    await service.close()
    assert [item.token_ids for item in result.sequences] == expected
    assert set(service.num_kills.values()) == {2}
