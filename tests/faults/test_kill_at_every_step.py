"""One request of each kind; at each of its tokens a part dies. What arrives is what arrives when nothing dies.

Each part in turn dies at each token: four runs of a request, in each of which the part that dies at a token is the next
one in turn. One of the four runs by default, with MIDSTREAM_ALL_KILLS=1 all of them, over frames and gRPC.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from midstream.client.result import Result
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from tests.faults.rig import KINDS, Rig
from tests.faults.small_model import make_small_model

NUM_TOKENS = 48
ROTATIONS = range(4) if os.environ.get("MIDSTREAM_ALL_KILLS") else None
PROMPT = list(range(400, 437))
SEEDED = pb.SamplingConfig(
    temperature=0.8, top_k=40, seed=5, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
)
GREEDY = pb.SamplingConfig(temperature=0.0)
STOPS = ["never, never", "日日日", "on and on, on and on"]
# Kinds of request; what a model or worker learns is added here.
REQUESTS: dict[str, dict[str, object]] = {
    "greedy": {"sampling": GREEDY},
    "seeded, with penalties": {"sampling": SEEDED},
    "three sequences": {"sampling": pb.SamplingConfig(temperature=0.9, top_k=30, seed=9, num_return_sequences=3)},
    "stop words": {"sampling": SEEDED, "stopping": pb.StoppingConfig(stop_words=STOPS, ignore_eos=True)},
    "emoji and Chinese": {"sampling": pb.SamplingConfig(temperature=1.3, top_k=40, seed=3)},
    "beams": {"sampling": pb.SamplingConfig(beam_width=3, num_return_sequences=2)},
    "guided": {
        "sampling": pb.SamplingConfig(temperature=1.0, seed=8),
        "guided_decoding": pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="([a-z]+ ){200}"),
    },
}
TRANSPORTS: Mapping[str, tuple[str, ...]] = dict.fromkeys(REQUESTS, ("frames",)) | {"seeded, with penalties": ("grpc",)}
if ROTATIONS:
    TRANSPORTS = dict.fromkeys(REQUESTS, ("frames", "grpc"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
async def rig(folder: ModelFolder, tmp_path: Path, transport: str) -> AsyncIterator[Rig]:
    gc.freeze()  # each part collects garbage when it stops; what was imported is none
    rig = Rig(folder, tmp_path / "journal", transport)
    await rig.start()
    yield rig
    await rig.close()
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


@pytest.mark.parametrize(
    ("kind", "transport"), [(kind, transport) for kind, transports in TRANSPORTS.items() for transport in transports]
)
async def test_whatever_dies_at_any_token_the_output_is_the_same(kind: str, transport: str, rig: Rig) -> None:
    expected = await rig.run(request_of(kind, "undisturbed"), {})
    assert len(expected.token_ids) == NUM_TOKENS or kind == "stop words"
    for rotation in ROTATIONS or (list(REQUESTS).index(kind) % 4,):
        kills = {number: KINDS[(number + rotation) % 4] for number in range(NUM_TOKENS)}
        result = await rig.run(request_of(kind, f"disturbed {rotation}"), kills)
        assert output(result) == output(expected)
    assert rig.is_over_frames == (transport == "frames")
    num_kills = len(expected.token_ids) * len(ROTATIONS or (0,))
    assert sum(rig.num_kills.values()) >= num_kills
    print(kind, rig.num_kills, expected.text)
