"""Groups of real processes over gloo compute the same as one rank, for every feature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.batch.step import Fork, OutputParams, SamplingParams, StepOutput
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import ForwardInputs, Probe
from midstream.errors import ConfigError
from protos import generation_pb2 as pb
from tests.gpu_worker.adapters import ALL_MODULES, make_lora, ref_of
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents, outputs
from tests.gpu_worker.rank_pool import RankPool
from tests.gpu_worker.test_models import Recorder, prompt
from tests.gpu_worker.test_running_ahead import plan, run_ahead, run_in_turn
from tests.gpu_worker.tiny_models import SHAPE, Driver, ints, make_runner, make_tiny_model

VOCAB = SHAPE["vocab_size"]
# Logits are about 10, where float32 values are 1e-6 apart; partial sums are rounded in another order.
TOLERANCE = 1e-5
# In these models, the heads, KV heads, features, vocabulary or layers cannot be divided evenly among the ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one_kv_head": (
        "Mistral",
        {"sliding_window": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "three_kv_heads": ("Qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
}
REPORTED = OutputParams(
    prompt_log_probs=2,
    context_logits=True,
    generation_logits=True,
    hidden_states=((0, True), (1, True), (2, False), (3, True)),
    topk_logits=((4, True),),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    family, settings = MODELS[request.param]
    make_tiny_model(folder, family, **settings)
    return folder


def assert_close(found: Tensor, wanted: Tensor) -> None:
    scale = max([1.0, *wanted.abs().flatten().tolist()])
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=TOLERANCE * scale)


def logits_of(runner: ModelRunner) -> list[Tensor]:
    """Return logits of whole and chunked prefills, decodes alongside a prefill, and a shared prefix."""
    with pytest.MonkeyPatch.context() as patch:
        driver, recorder = Driver(runner), Recorder(runner, patch)
        first, second = prompt(70, seed=1), prompt(45, seed=2)
        driver.step([driver.sequence(0, first)], [(0, 0, 70)])
        driver.step([driver.sequence(1, second)], [(1, 0, 19)])  # no row samples a token
        driver.step([], [(1, 19, 26)], generation=[0])
        third = first[:48] + prompt(9, seed=3)
        driver.step([driver.sequence(2, third, shared_blocks=driver.blocks[0][:3])], [(2, 48, 9)], generation=[0, 1])
        driver.step(generation=[0, 1, 2])
    return recorder.logits


@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)], ids=["tensor", "pipeline", "both"])
def test_logits_equal_one_ranks(pool: RankPool, folder: Path, grid: tuple[int, int]) -> None:
    wanted = logits_of(make_runner(folder, kernels="torch"))
    with pool.runner(folder, *grid, kernels="torch") as runner:
        assert runner.model.part != runner.model.description
        found = logits_of(runner)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


def test_ranks_with_whole_experts_give_the_logits_of_one_rank(pool: RankPool, tmp_path: Path) -> None:
    """One rank holds two of the five experts, the other holds three; each token uses one expert."""
    make_tiny_model(tmp_path, "Mixtral", num_local_experts=5, num_experts_per_tok=1)
    wanted = logits_of(make_runner(tmp_path, kernels="torch"))
    with pool.runner(tmp_path, 2, 1, kernels="torch", expert_parallel=True) as runner:
        assert {mixture and mixture.held for mixture in runner.model.part.mixtures} == {range(2)}
        found = logits_of(runner)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


def test_stages_run_the_cpu_kernels_to_the_bit(pool: RankPool, tiny_folder: Path, tiny_runner: ModelRunner) -> None:
    with pool.runner(tiny_folder, 1, 3) as runner:
        assert runner.model.kv_dtype == torch.int16
        assert all(map(torch.equal, logits_of(runner), logits_of(tiny_runner)))


def test_three_ranks_give_the_same_bits_whatever_the_batch(
    pool: RankPool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the ranks hold the same KV head."""
    tokens = prompt(40, seed=1)
    wanted = logits_of(make_runner(tiny_folder, kernels="torch"))
    with pool.runner(tiny_folder, 3, 1) as runner:
        for one, other in zip(logits_of(runner), wanted, strict=True):
            assert_close(one, other)
        driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
        driver.step([driver.sequence(0, tokens)], [(0, 0, 40)])
        driver.step([driver.sequence(1, tokens), driver.sequence(2, prompt(33))], [(2, 0, 33), (1, 0, 17)], [0])
        driver.step([], [(1, 17, 23)], [0, 2])
    assert torch.equal(recorder.logits[2][0], recorder.logits[0][0])


@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)], ids=["tensor", "pipeline", "both"])
def test_a_group_runs_ahead_with_the_same_tokens(pool: RankPool, tiny_folder: Path, grid: tuple[int, int]) -> None:
    """Sequences start, are prefilled in chunks, decode, are preempted, fork and end; the other ranks receive tokens on
    the device.
    """
    steps = plan(np.random.default_rng(1).integers(0, 6, 16).tolist(), kinds=4)
    with pool.runner(tiny_folder, *grid, kernels="torch", run_ahead="on") as runner:
        in_turn = run_in_turn(runner, steps)
        with pytest.MonkeyPatch.context() as patch:
            passes = note_passes(runner, patch)
            ahead = run_ahead(runner, steps)
    # Most passes received placeholders for tokens that the host does not know yet.
    assert sum(min(tokens) < 0 for tokens in passes) > len(passes) / 2
    for one, other in zip(in_turn, ahead, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs == other.log_probs
        assert one.errors == other.errors
    alone = run_in_turn(make_runner(tiny_folder, kernels="torch"), steps)
    assert [output.token_ids.tolist() for output in ahead] == [output.token_ids.tolist() for output in alone]


@pytest.mark.parametrize(("grid", "kernels"), [((1, 3), "auto"), ((2, 2), "torch")])
def test_the_stages_compute_micro_batches_at_the_same_time_with_the_same_tokens(
    pool: RankPool, tiny_folder: Path, grid: tuple[int, int], kernels: str
) -> None:
    """The requests have greedy and random sampling, beams, penalties, drafts and reported outputs, and there are too
    few blocks for all of them. The scheduler's connection is lost once, while passes are open.
    """
    made = requests() + reporting()
    wanted = CoreWithRunners(make_runner(tiny_folder, kernels=kernels), end_ids=(2,)).run(made)
    with pool.runner(tiny_folder, *grid, kernels=kernels) as runner:
        with pytest.MonkeyPatch.context() as patch:
            open_passes = note_open_passes(runner, patch)
            system = CoreWithRunners(runner, end_ids=(2,), num_blocks=30)
            found = [system.submit(request) for request in made]
            while not (len(open_passes) > 20 and open_passes[-1] == grid[1]):
                assert system.step()
            system.lose_worker()
            system.run(())
        assert system.core.totals.num_preemptions > 0
        assert runner.num_micro_batches == grid[1]
    # Most passes begin before the previous one has ended.
    assert max(open_passes) == grid[1]
    assert sum(num > 1 for num in open_passes) > len(open_passes) / 2
    for one, other in zip(found, wanted, strict=True):
        assert outputs(one) == outputs(other)
    if kernels == "auto":
        assert [contents(request) for request in found] == [contents(request) for request in wanted]


def reporting() -> list[pb.GenerateRequest]:
    """Return requests of several lengths that report log probabilities; one of them also reports context logits."""
    return [
        pb.GenerateRequest(
            request_id=f"reports {number}",
            token_ids=pb.TokenIds(values=prompt(5 + 11 * number, seed=number)),
            sampling=pb.SamplingConfig(temperature=0),
            output=pb.OutputConfig(log_probs=2, prompt_log_probs=1, return_context_logits=number == 1),
            max_tokens=6 + number,
        )
        for number in range(6)
    ]


def note_open_passes(runner: ModelRunner, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of open passes each time that a pass begins."""
    counts: list[int] = []
    decoder: Any = runner.model.decoder
    begin = decoder.begin

    def note(inputs: ForwardInputs, probe: Probe | None = None) -> None:
        begin(inputs, probe)
        counts.append(decoder._part.num_open)

    patch.setattr(decoder, "begin", note)
    return counts


def note_passes(runner: ModelRunner, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that receives the token ids of each forward pass."""
    passes: list[list[int]] = []
    forward = runner.model.decoder.forward

    def note(inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        passes.append(inputs.token_ids.tolist())
        return forward(inputs, probe)

    patch.setattr(runner.model.decoder, "forward", note)
    return passes


def test_running_ahead_is_rejected_if_not_possible(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="requires a GPU"):
        make_runner(tiny_folder, kernels="native", run_ahead="on")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    model = make_tiny_model(folder / "model", "Mistral", num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    make_lora(model, folder / "lora", seed=1, r=4, lora_alpha=8, target_modules=ALL_MODULES)
    make_lora(model, folder / "other", seed=2, r=3, lora_alpha=8, target_modules=["o_proj", "k_proj"])
    return folder


@pytest.mark.parametrize("is_replicated", [True, False])
def test_post_processors_run_on_both_ranks_of_a_stage_or_on_rank_0(
    pool: RankPool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replicated: bool
) -> None:
    """All ranks get the same arguments in the same order, for single sequences and for batches; only the result of rank
    0 is used.
    """
    monkeypatch.setenv("CALLS", str(tmp_path))
    requests = [
        pb.GenerateRequest(
            request_id=name,
            token_ids=pb.TokenIds(values=prompt(6, seed=seed)),
            max_tokens=4,
            sampling=pb.SamplingConfig(temperature=0.0),
            logits_post_processor_name=processor,
            client_id=f"client {name}",
        )
        for seed, (name, processor) in enumerate([("a", "one"), ("b", "all"), ("c", "all"), ("d", "one")])
    ]
    module = "tests.gpu_worker.recorded_calls"
    with pool.runner(
        tiny_folder,
        2,
        1,
        environment={"CALLS": str(tmp_path)},
        kernels="torch",
        logits_post_processors=f"one={module}:RankPlusOne,all={module}:RankPlusOneForAll",
        replicate_post_processors=is_replicated,
    ) as runner:
        made = CoreWithRunners(runner, ()).run(requests)
    # Rank 0 chooses the previous token plus 1; rank 1 would choose the previous token plus 2.
    assert [outputs(request)[0] for request in made] == [
        [(request.token_ids.values[-1] + 1 + place) % VOCAB for place in range(4)] for request in requests
    ]
    calls = [(tmp_path / f"{rank}").read_text() for rank in range(2) if (tmp_path / f"{rank}").exists()]
    assert len(calls) == (2 if is_replicated else 1)
    assert len(set(calls)) == 1
    assert "['b', 'c']" in calls[0]
    assert "'client a'" in calls[0]


@pytest.fixture(scope="module")
def runners(pool: RankPool, adapted: Path) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """Return a runner with one rank and one with four, both with a draft model and a small adapter cache."""
    settings = {"kernels": "torch", "draft_model": str(adapted / "model"), "lora_num_device_module_layer": 200}
    with ExitStack() as stack:
        yield (
            make_runner(adapted / "model", **settings),
            stack.enter_context(pool.runner(adapted / "model", 2, 2, **settings)),
        )


def reports_of(runner: ModelRunner, adapted: Path) -> list[StepOutput]:
    """Run adapters, virtual tokens, reported tensors, sampled tokens and a copied block in one batch."""
    driver = Driver(runner)
    drawn = SamplingParams(temperature=0.9, seed=7, top_p=0.9, log_probs=3)
    table = np.random.default_rng(5).normal(size=(3, SHAPE["hidden_size"])).astype(np.float32)
    virtual = replace(driver.sequence(2, [VOCAB, VOCAB + 1, VOCAB + 2, 9, 8]), prompt_table=table)
    new = [
        replace(driver.sequence(0, prompt(40, seed=4), outputs=REPORTED), lora=ref_of(runner, adapted / "lora")),
        replace(driver.sequence(1, prompt(20, seed=5), drawn), lora=ref_of(runner, adapted / "other")),
        virtual,
    ]
    made = [driver.step(new[:1], [(0, 0, 25)]), driver.step(new[1:], [(0, 25, 15), (1, 0, 20), (2, 0, 5)])]
    made.append(driver.step(generation=[0, 1, 2]))
    driver.step(released_rows=ints([1]))
    source, target = driver.blocks[0][0], driver.blocks[1][0]
    copied = ints([target, *driver.blocks[0][1:]])
    made.append(
        driver.step(
            forks=(Fork(0, 3, copied),),
            copy_sources=ints([source]),
            copy_targets=ints([target]),
            generation=[0, 2],
        )
    )
    # The adapter of row 1 is no longer used, and must be evicted before this adapter fits.
    made.append(
        driver.step([replace(driver.sequence(1, prompt(9)), lora=ref_of(runner, adapted / "lora"))], [(1, 0, 9)])
    )
    return made


def test_adapters_virtual_tokens_and_outputs_equal_those_of_one_rank(
    runners: tuple[ModelRunner, ModelRunner], adapted: Path
) -> None:
    wanted, found = (reports_of(runner, adapted) for runner in runners)
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert not one.errors
        assert [(tensor.row, tensor.name) for tensor in one.tensors] == [(t.row, t.name) for t in other.tensors]
        for tensor, expected in zip(one.tensors, other.tensors, strict=True):
            assert_close(torch.from_numpy(tensor.values), torch.from_numpy(expected.values))
        for mine, theirs in zip(one.log_probs, other.log_probs, strict=True):
            assert mine.top_token_ids == theirs.top_token_ids
            assert mine.top_log_probs == pytest.approx(theirs.top_log_probs, abs=1e-4)
        for mine_of_prompt, theirs_of_prompt in zip(one.prompt_log_probs, other.prompt_log_probs, strict=True):
            assert mine_of_prompt.token_log_probs == pytest.approx(theirs_of_prompt.token_log_probs, abs=1e-4)


def requests() -> list[pb.GenerateRequest]:
    look_up = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=3)
    drafted = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_DRAFT_MODEL, num_draft_tokens=3)
    kinds: list[tuple[dict[str, Any], pb.SpeculativeConfig | None]] = [
        ({"temperature": 0}, None),
        ({"temperature": 0}, look_up),
        ({"temperature": 0}, drafted),
        ({"temperature": 1, "seed": 5, "num_return_sequences": 2}, None),
        ({"temperature": 0, "repetition_penalty": 1.2, "embedding_bias": {20: 1.5}}, None),
        ({"beam_width": 3, "num_return_sequences": 2}, None),
    ]
    return [
        pb.GenerateRequest(
            request_id=str(number),
            token_ids=pb.TokenIds(values=prompt(30, seed=6) + [7, 8, 9] * 4),
            sampling=pb.SamplingConfig(**sampling),
            speculative=speculative,
            max_tokens=12,
        )
        for number, (sampling, speculative) in enumerate(kinds)
    ]


def test_beams_and_drafts_and_draws_give_the_same_tokens(runners: tuple[ModelRunner, ModelRunner]) -> None:
    wanted, found = (CoreWithRunners(runner, end_ids=(2,)).run(requests()) for runner in runners)
    assert [outputs(request) for request in found] == [outputs(request) for request in wanted]
    assert found[2].counters.num_accepted_tokens > 0
