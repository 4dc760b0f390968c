"""Adapters and virtual tokens in the scheduler's core: requests are preempted and moved, and the prefix cache never
confuses them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_worker.model_runner import ModelRunner
from protos import generation_pb2 as pb
from tests.gpu_worker.adapters import ALL_MODULES, make_lora, make_prompt
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.test_models import prompt
from tests.gpu_worker.tiny_models import SHAPE, make_runner, make_tiny_model

VOCAB, HIDDEN = SHAPE["vocab_size"], SHAPE["hidden_size"]
END_IDS = (2,)
KINDS = ("", "small", "large", "soft", "table", "other_table")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recovery")
    model = make_tiny_model(folder / "model", "Llama")
    make_lora(model, folder / "small", 1, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    make_lora(model, folder / "large", 2, r=16, lora_alpha=8, target_modules=ALL_MODULES)
    make_prompt(model, folder / "soft", 3, num_virtual_tokens=5)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder / "model", max_kv_tokens=8192, max_batch_size=64, lora_host_cache_bytes=1 << 20)


def resolved(runner: ModelRunner, folder: Path, name: str) -> pb.ResolvedAdapter:
    adapter = runner.adapters.load(str(folder / name)).result()
    count = 0 if adapter.prompt_table is None else len(adapter.prompt_table)
    return pb.ResolvedAdapter(
        path=str(folder / name),
        fingerprint=adapter.fingerprint,
        num_bytes=runner.adapters.size_of(adapter),
        num_virtual_tokens=count,
        first_virtual_token=VOCAB if count else 0,
    )


def request(
    runner: ModelRunner, folder: Path, request_id: str, kind: str, tokens: list[int], max_tokens: int = 20
) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id=request_id, max_tokens=max_tokens)
    made.sampling.temperature, made.sampling.seed = 0.7, len(request_id)
    if kind.endswith("table"):
        values = np.random.default_rng(len(kind)).normal(size=(6, HIDDEN)).astype(np.float16)
        made.prompt_tuning.table.CopyFrom(
            pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT16, shape=values.shape, data=values.tobytes())
        )
        tokens = [*tokens[:4], *range(VOCAB, VOCAB + 6), *tokens[4:]]
    elif kind == "soft":
        made.prompt_tuning.name = kind
        made.prompt_tuning.resolved.CopyFrom(resolved(runner, folder, kind))
    elif kind:
        made.lora.name = kind
        made.lora.resolved.CopyFrom(resolved(runner, folder, kind))
    made.token_ids.values.extend(tokens)
    return made


def requests(runner: ModelRunner, folder: Path) -> list[pb.GenerateRequest]:
    return [request(runner, folder, f"r{i}", KINDS[i % 6], prompt(18 + 3 * i, seed=i)) for i in range(12)]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner, folder: Path) -> list[list[list[int]]]:
    return [outputs(CoreWithRunners(runner, END_IDS).run([item])[0]) for item in requests(runner, folder)]


def test_a_pool_too_small_pauses_them_and_changes_nothing(
    runner: ModelRunner, folder: Path, alone: list[list[list[int]]]
) -> None:
    system = CoreWithRunners(runner, END_IDS, num_blocks=14)
    found = system.run(requests(runner, folder))
    assert [outputs(item) for item in found] == alone
    assert system.core.totals.num_preemptions > 0


@pytest.mark.parametrize("steps", [1, 2, 5, 11, 17])
def test_the_loss_of_the_worker_changes_nothing(
    runner: ModelRunner, folder: Path, alone: list[list[list[int]]], steps: int
) -> None:
    system = CoreWithRunners(runner, END_IDS)
    made = [system.submit(item) for item in requests(runner, folder)]
    for _ in range(steps):
        system.step()
    system.lose_worker()
    for ref in ("small", "large", "soft"):  # as if a new worker had loaded no adapter yet
        runner.adapters.unload(resolved(runner, folder, ref).fingerprint)
    system.run([])
    assert [outputs(item) for item in made] == alone


def test_a_prefix_is_shared_only_with_equal_adapter_and_embeddings(runner: ModelRunner, folder: Path) -> None:
    system, tokens = CoreWithRunners(runner, END_IDS), prompt(64, seed=5)
    first = system.run([request(runner, folder, f"a{kind}", kind, tokens) for kind in KINDS])
    assert [item.counters.num_cached_tokens for item in first] == [0] * len(KINDS)
    again = system.run([request(runner, folder, f"a{kind}.", kind, tokens) for kind in KINDS])
    assert [item.counters.num_cached_tokens for item in again] == [48, 48, 48, 64, 64, 64]
    alone = [
        CoreWithRunners(runner, END_IDS).run([request(runner, folder, f"a{kind}.", kind, tokens)])[0] for kind in KINDS
    ]
    assert [outputs(item) for item in again] == [outputs(item) for item in alone]


def test_no_more_adapters_run_at_a_time_than_fit(runner: ModelRunner, folder: Path) -> None:
    small, large = (resolved(runner, folder, name).num_bytes for name in ("small", "large"))
    room = runner.adapters.device_bytes
    try:
        runner.adapters.device_bytes = max(small, large)
        system = CoreWithRunners(runner, END_IDS)
        kinds = ("small", "large", "small", "", "large")
        made = [
            system.submit(request(runner, folder, f"x{i}", kind, prompt(10, seed=i))) for i, kind in enumerate(kinds)
        ]
        at_once = 0
        while system.step():
            names = {item.spec.lora_name for item in system.core.groups[0].active} - {""}
            at_once = max(at_once, len(names))
        assert at_once == 1
        assert {len(outputs(item)) for item in made} == {1}
        assert all(item.failure is None for item in made)
    finally:
        runner.adapters.device_bytes = room


def test_an_adapter_larger_than_any_workers_room_is_refused(runner: ModelRunner, folder: Path) -> None:
    system = CoreWithRunners(runner, END_IDS)
    item = request(runner, folder, "big", "large", prompt(5))
    item.lora.resolved.num_bytes = runner.adapters.device_bytes + 1
    (made,) = system.run([item])
    assert made.failure is not None
    assert made.failure.field == "lora.name"


def test_a_prompt_with_ids_beyond_its_table_is_refused(runner: ModelRunner, folder: Path) -> None:
    system = CoreWithRunners(runner, END_IDS)
    item = request(runner, folder, "beyond", "table", prompt(8))
    item.token_ids.values.append(VOCAB + 6)
    with pytest.raises(KeyError):
        system.submit(item)
