"""Many requests to the embedded model with random features: each output is bit-identical to that of the request when it
runs alone.

TEST_MIXTURE=100 pytest tests/gpu_worker/test_mixture.py runs more requests. TEST_ALL_PLACES=1 pytest
tests/gpu_worker/test_mixture.py -k tiers runs them with all combinations of tiers and roles.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from scheduler.core.request import Request
from tests.adapter_folders import write_lora, write_prompt
from tests.example_package import install
from tests.gpu_worker.adapters import adapted
from tests.gpu_worker.core_with_runners import Contents, CoreWithRunners, contents
from tests.gpu_worker.mixture import HIDDEN_SIZE, PROMPTS, VOCAB_SIZE, draw, resolve
from tests.gpu_worker.test_post_processors import EXAMPLE
from tests.gpu_worker.tiny_models import make_runner

# Running each request alone takes most of a minute on a slow or busy machine.
pytestmark = pytest.mark.timeout(600)

TOKENIZER = Tokenizer.from_file(str(open_model_folder("smollm2").path / "tokenizer.json"))
NUM_REQUESTS = int(os.environ.get("TEST_MIXTURE", "64"))
END_IDS = (0, 2)
NUM_ROWS = 256
# Number of outputs that are compared with transformers and PEFT.
NUM_COMPARED = 16
# Tolerance, relative to the largest logit: there are thirty layers of 16-bit integer products, and random adapters
# amplify their rounding errors.
BOUND, LORA_BOUND = 1e-3, 1e-2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write two LoRA adapters and a prompt adapter."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_lora(root / "r4", 4, 1), write_lora(root / "r12", 12, 2), write_prompt(root / "soft", 4, 3)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(EXAMPLE, tmp_path_factory.mktemp("package")))
        importlib.invalidate_caches()
        runner = make_runner("smollm2", max_kv_tokens=16_384, max_batch_size=NUM_ROWS, max_num_tokens=2048)
        yield runner
        runner.close()


@pytest.fixture(scope="module")
def requests(runner: ModelRunner, folders: list[Path]) -> list[pb.GenerateRequest]:
    prompts = [TOKENIZER.encode(text).ids for text in PROMPTS]
    adapters = {path.name: resolve(runner, path) for path in folders}
    return [draw(number, prompts, adapters) for number in range(NUM_REQUESTS)]


def start(runner: ModelRunner, **limits: Any) -> CoreWithRunners:
    return CoreWithRunners(runner, END_IDS, max_batch_size=NUM_ROWS, **limits)


@pytest.fixture(scope="module")
def alone(runner: ModelRunner, requests: list[pb.GenerateRequest]) -> list[list[Contents]]:
    return [contents(start(runner).run([request])[0]) for request in requests]


def by_number(made: list[Request]) -> list[list[Contents]]:
    return [contents(request) for request in sorted(made, key=lambda request: int(request.request_id[1:]))]


def test_each_is_what_it_is_alone_in_whatever_order_they_arrive(
    runner: ModelRunner, requests: list[pb.GenerateRequest], alone: list[list[Contents]]
) -> None:
    """Most of the requests arrive at once, and the others one per step."""
    system = start(runner)
    waiting = random.Random(1).sample(requests, len(requests))
    made = [system.submit(waiting.pop()) for _ in range(NUM_REQUESTS * 3 // 4)]
    most = 0
    while system.step() or waiting:
        most = max(most, len(system.core.groups[0].active))
        if waiting:
            made.append(system.submit(waiting.pop()))
    assert by_number(made) == alone
    assert most > 40


def test_pauses_and_the_loss_of_the_worker_change_nothing(
    runner: ModelRunner, requests: list[pb.GenerateRequest], alone: list[list[Contents]]
) -> None:
    """The pool is so small that requests preempt each other, and the worker is lost three times."""
    system = start(runner, num_blocks=40)
    made = [system.submit(request) for request in requests]
    for steps in (3, 8, 12):
        for _ in range(steps):
            assert system.step()
        system.lose_worker()
    system.run([])
    assert by_number(made) == alone
    assert system.core.totals.num_preemptions > 3
    assert sum(request.counters.num_recoveries for request in made) > 20


def test_the_loss_of_the_scheduler_changes_nothing(
    runner: ModelRunner, requests: list[pb.GenerateRequest], alone: list[list[Contents]], tmp_path: Path
) -> None:
    """The scheduler is replaced and recovers from its journal, even while prompts are computed in chunks."""
    system = start(runner, journal=tmp_path / "journal", max_num_tokens=300)
    for request in requests:
        system.submit(request)
    for steps in (1, 1, 1, 2, 2, 2, 3, 3):
        for _ in range(steps):
            assert system.step()
        system.lose_scheduler()
    system.run([])
    made = [system.core.lifecycle.requests[request.request_id] for request in requests]
    assert by_number(made) == alone
    assert sum(request.counters.num_recoveries for request in made) > 50


ALL_PLACES = "TEST_ALL_PLACES" in os.environ
TIERS = {"no tiers": (), "host": ("host",), "disk": ("disk",), "host and disk": ("host", "disk")}
LAYOUTS = ("together", "apart on one host", "apart on two hosts")
SMALL_BLOCK = 4  # most prompts have several full blocks


def place_settings(folder: Path, tiers: str, layout: str, number: int) -> dict[str, Any]:
    """Return the settings of worker `number` for its role and its tiers; workers on the same host share the tiers."""
    host = folder / (f"host{number}" if layout == "apart on two hosts" else "host")
    settings: dict[str, Any] = {"tokens_per_block": SMALL_BLOCK}
    if layout != "together":
        settings["role"] = ("prefill", "decode")[number]
    if layout == "apart on one host" or "host" in TIERS[tiers]:
        settings["shared_kv_folder"] = str(host / "shared")
    if "host" in TIERS[tiers]:
        settings["host_kv_bytes"] = 1 << 28
    if "disk" in TIERS[tiers]:
        settings["disk_kv_folder"] = str(host / "disk")
    return settings


@pytest.fixture
def workers(
    runner: ModelRunner, folders: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[ModelRunner]]:
    """Return two workers with the tiers and the layout in the test's parameters."""
    tiers, layout = request.param
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(2):
            places = place_settings(tmp_path, tiers, layout, number)
            made.append(
                make_runner("smollm2", max_kv_tokens=16_384, max_batch_size=NUM_ROWS, max_num_tokens=2048, **places)
            )
            stack.callback(made[-1].close)
            for folder in folders:
                resolve(made[-1], folder)
        yield made


@pytest.mark.timeout(3600 if ALL_PLACES else 600)
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((tiers, layout), id=f"{tiers}, {layout}")
        for tiers, layout in (itertools.product(TIERS, LAYOUTS) if ALL_PLACES else [("disk", "apart on two hosts")])
    ],
    indirect=True,
)
def test_tiers_and_roles_change_nothing(
    workers: list[ModelRunner], requests: list[pb.GenerateRequest], alone: list[list[Contents]]
) -> None:
    """First each worker is lost while the requests run; then everything is restarted, and their blocks are reused."""
    num = len(requests) if ALL_PLACES else 16
    is_apart = workers[0].kv.server is not None
    for is_restarted in (False, True):
        system = CoreWithRunners(
            workers[0], END_IDS, others=workers[1:], max_batch_size=NUM_ROWS, enable_block_reuse=True
        )
        made = [system.submit(request) for request in requests[:num]]
        for lost in () if is_restarted else (0, 1):
            for _ in range(4):
                assert system.step()
            system.lose_worker(lost)
        system.run([])
        assert by_number(made) == alone[:num]
        assert (system.core.totals.num_handovers > num // 4) == is_apart
    if workers[0].kv.tiers is not None and workers[0].kv.tiers.name:
        hits = [tier.num_hits for tier in workers[0].kv.tiers._tiers]
        assert hits[0] > num // 2
    shares_tiers = len({worker.kv.tiers.name for worker in workers if worker.kv.tiers is not None} - {""}) == 1
    if is_apart and not shares_tiers:  # blocks in shared tiers need no transfer
        server, fetcher = workers[0].kv.server, workers[1].kv.fetcher
        assert server is not None
        assert fetcher is not None
        assert server.num_sent >= fetcher.num_fetched > num // 4
        assert fetcher.num_damaged == 0


def test_reported_outputs_equal_those_of_transformers_and_peft(
    requests: list[pb.GenerateRequest],
    alone: list[list[Contents]],
    transformers_model: torch.nn.Module,
    folders: list[Path],
) -> None:
    """The reported logits of each output token are the model's own, regardless of how the token was chosen.

    A guided output that ended by itself matches its guide.
    """
    paths = {path.name: path for path in folders}
    num_compared = num_complete = 0
    for request, sequences in zip(requests, alone, strict=True):
        num_complete += sum(is_complete(request, item) for item in sequences)
        reports = [item for item in sequences if item.log_probs or "generation_logits" in item.tensors]
        if not reports or num_compared > NUM_COMPARED:
            continue
        lora = request.lora.name
        with adapted(transformers_model, paths[lora]) if lora else contextlib.nullcontext(transformers_model) as model:
            for item in reports:
                compare(request, item, reference(model, request, item.tokens, paths))
                num_compared += 1
    assert num_compared > NUM_COMPARED
    assert num_complete > 5


def reference(model: Any, request: pb.GenerateRequest, output: list[int], paths: dict[str, Path]) -> torch.Tensor:
    """Return the logits from which each output token was chosen, as float32 [output tokens, vocabulary]."""
    tokens = torch.tensor([*request.token_ids.values, *output])
    table = torch.zeros(0, HIDDEN_SIZE)
    if request.prompt_tuning.name:
        table = load_file(paths[request.prompt_tuning.name] / "adapter_model.safetensors")["prompt_embeddings"]
        tokens = torch.cat([torch.arange(VOCAB_SIZE, VOCAB_SIZE + len(table)), tokens])
    elif request.prompt_tuning.HasField("table"):
        values = np.frombuffer(request.prompt_tuning.table.data, dtype=np.float16).astype(np.float32)
        table = torch.from_numpy(values).reshape(-1, HIDDEN_SIZE)
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(tokens.clamp(max=VOCAB_SIZE - 1))
        is_virtual = tokens >= VOCAB_SIZE
        embedded[is_virtual] = table[tokens[is_virtual] - VOCAB_SIZE]
        logits: torch.Tensor = model(inputs_embeds=embedded[None]).logits[0]
    return logits[-len(output) - 1 : -1]


def compare(request: pb.GenerateRequest, item: Contents, logits: torch.Tensor) -> None:
    bound = float(logits.abs().max()) * (LORA_BOUND if request.HasField("lora") else BOUND)
    if "generation_logits" in item.tensors:
        found = torch.from_numpy(item.array("generation_logits", VOCAB_SIZE).copy())
        assert float((found - logits).abs().max()) < bound, request.request_id
    if item.log_probs and request.sampling.beam_width <= 1:  # beams report logits of the distribution that was searched
        own = torch.log_softmax(logits, dim=1)[torch.arange(len(item.tokens)), torch.tensor(item.tokens)]
        assert [found.log_prob for found in item.log_probs] == pytest.approx(own.tolist(), abs=bound), request


def is_complete(request: pb.GenerateRequest, item: Contents) -> bool:
    """Return whether the output completes its guide; fail if the output violates the guide."""
    guide = request.guided_decoding
    if not request.HasField("guided_decoding") or item.stop_token_id is None:
        return False
    text = TOKENIZER.decode(item.tokens[:-1])
    if guide.guide_type == pb.GUIDE_TYPE_REGEX:
        assert re.fullmatch(guide.guide, text), (text, request)
    elif guide.guide_type == pb.GUIDE_TYPE_JSON_SCHEMA:
        jsonschema.validate(json.loads(text), json.loads(guide.guide))
    else:
        assert set(text.split(", ")) <= {"yes", "no"}, (text, request)
    return True


@pytest.mark.parametrize("beam_width", [1, 2])
def test_a_guide_that_is_fulfilled_ends_before_min_tokens(runner: ModelRunner, beam_width: int) -> None:
    """Only an end is allowed after the guide, so an end id ends the sequence even before min_tokens."""
    request = pb.GenerateRequest(
        request_id="early",
        token_ids=pb.TokenIds(values=[504, 3575, 314]),
        max_tokens=8,
        sampling=pb.SamplingConfig(temperature=0, min_tokens=6, beam_width=beam_width),
        stopping=pb.StoppingConfig(stop_token_ids=[28, 30]),
        guided_decoding=pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="yes|no"),
    )
    (made,) = contents(start(runner).run([request])[0])
    assert made.stop_token_id in (*END_IDS, 28, 30)
    assert TOKENIZER.decode(made.tokens[:-1]) in ("yes", "no")


def test_the_mixture_has_all_features(requests: list[pb.GenerateRequest], alone: list[list[Contents]]) -> None:
    used = {field.name for request in requests for part in _parts(request) for field, _ in part.ListFields()}
    assert not {"beam_width", "speculative", "guided_decoding", "lora", "prompt_tuning", "bad_word_token_ids"} - used
    assert {len(sequences) for sequences in alone} == {1, 2, 3, 4}
    pairs = {pair for request in requests for pair in itertools.combinations(kinds(request), 2)}
    assert not {*itertools.combinations(KINDS, 2)} - pairs - {("beams", "several")}
    assert len({str(item) for item in alone}) > 0.9 * NUM_REQUESTS


KINDS: dict[str, Callable[[pb.GenerateRequest], bool]] = {
    "beams": lambda request: request.sampling.beam_width > 1,
    "several": lambda request: request.sampling.num_return_sequences > 1 >= request.sampling.beam_width,
    "guided": lambda request: request.HasField("guided_decoding"),
    "lora": lambda request: request.HasField("lora"),
    "processor": lambda request: bool(request.logits_post_processor_name),
    "drafts": lambda request: request.HasField("speculative"),
    "log_probs": lambda request: request.output.HasField("log_probs"),
}


def kinds(request: pb.GenerateRequest) -> list[str]:
    return [name for name, is_used in KINDS.items() if is_used(request)]


def _parts(request: pb.GenerateRequest) -> list[Any]:
    return [request, request.sampling, request.stopping, request.output]
