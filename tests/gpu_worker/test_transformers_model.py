"""Models that use the transformers implementation with the paged cache, compared with transformers alone."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import kernels
from benchmarks.gpu.model import step_inputs
from gpu_worker.batch.step import OutputParams, SamplingParams
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.models.layers.linear import int8_rows
from gpu_worker.models.loader import load_model
from gpu_worker.models.native import CpuDecoder
from gpu_worker.models.transformers_model import TransformersDecoder
from gpu_worker.parallel.ranks import ALONE
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.families import SERVED_FAMILIES
from midstream.model.folder import open_model_folder, prepare_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.adapters import make_lora
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.launch_keys import BLOCKS_EACH, MOST_TOKENS, NUM_ROWS, VOCAB_SIZE, new_keys, trace
from tests.gpu_worker.one_device import META, run_on_one_device
from tests.gpu_worker.test_models import TOLERANCE, Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model

if TYPE_CHECKING:
    from gpu_worker.parallel.communicator import RankCommunicator

CPU = torch.device("cpu")
TABLES = torch.tensor([[5, 1], [2, 7], [4, 3]], dtype=torch.int32)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # This model has both soft caps, and windows on every other layer.
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 5.0}),
    # The last layers of this model share keys and values; its config.json has an intermediate size for each layer.
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
            "vocab_size_per_layer_input": 331,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "olmo": ("Olmo", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    # The config.json of this model has the names n_embd, n_layer and n_positions.
    "gpt2": ("GPT2", {"n_positions": 512, "scale_attn_by_inverse_layer_idx": True}),
    # The config.json of this model has the settings of the language model in text_config.
    "gemma3_with_images": (
        "Gemma3",
        {
            "text_config": {
                "head_dim": 32,
                "sliding_window": 24,
                "sliding_window_pattern": 3,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 1,
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """Return transformers' model of each family in turn, and its folder."""
    name, settings = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(folder, name, **settings), folder


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("gemma2")
    return make_tiny_model(folder, "Gemma2", **FAMILIES["gemma2"][1]), folder


def is_close(logits: Tensor, wanted: Tensor) -> bool:
    return float((logits - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_logits_equal_transformers(other: tuple[torch.nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One run has whole and chunked prefills, decodes during a prefill, and a shared prefix."""
    model, folder = other
    runner = make_runner(folder, implementation="transformers")
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    first, second = prompt(70, seed=1), prompt(45, seed=2)
    driver.step([driver.sequence(0, first)], [(0, 0, 70)])
    driver.step([driver.sequence(1, second)], [(1, 0, 19)], generation=[0])
    driver.step([], [(1, 19, 26)], generation=[0])
    third = first[:48] + prompt(9, seed=3)
    driver.step([driver.sequence(2, third, shared_blocks=driver.blocks[0][:3])], [(2, 48, 9)], generation=[0, 1])
    driver.step(generation=[0, 1, 2])
    whole = {row: expected_logits(model, driver.tokens[row]) for row in (0, 1, 2)}
    sampled = [[(0, 69)], [(0, 70)], [(1, 44), (0, 71)], [(2, 56), (0, 72), (1, 45)], [(0, 73), (1, 46), (2, 57)]]
    for logits, places in zip(recorder.logits, sampled, strict=True):
        assert is_close(logits, torch.stack([whole[row][position] for row, position in places]))


def test_output_does_not_depend_on_batch_or_chunks(gemma2: tuple[torch.nn.Module, Path]) -> None:
    driver = Driver(make_runner(gemma2[1], implementation="transformers"))
    sampling = SamplingParams(seed=7)
    alone = driver.run_alone(prompt(50), 12, sampling)
    assert driver.run_alone(prompt(50), 12, sampling, chunk=17) == alone
    driver.step([driver.sequence(0, prompt(50), sampling), driver.sequence(1, prompt(33, seed=4))], [(1, 0, 33)])
    driver.step([], [(0, 0, 50)], generation=[1])
    for _ in range(11):
        driver.step(generation=[0, 1])
    assert driver.output(0) == alone


def test_a_prepared_folder_generates_what_transformers_does(gemma2: tuple[Any, Path], tmp_path: Path) -> None:
    """Requests pass through the scheduler's core and the wire format, in one batch."""
    model, folder = gemma2
    prepared = prepare_model_folder(str(folder), tmp_path / "prepared")
    assert prepared.architecture == "gemma2"
    prompts = [prompt(40, seed=1), prompt(7, seed=2), prompt(40, seed=1)[:32] + prompt(5, seed=3)]
    requests = [
        pb.GenerateRequest(
            request_id=f"r{i}",
            token_ids=pb.TokenIds(values=tokens),
            max_tokens=12,
            sampling=pb.SamplingConfig(temperature=0),
        )
        for i, tokens in enumerate(prompts)
    ]
    answers = CoreWithRunners(make_runner(prepared.path, implementation="transformers"), ()).run(requests)
    for tokens, answer in zip(prompts, answers, strict=True):
        expected = model.generate(
            torch.tensor([tokens]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert outputs(answer) == [expected[0, len(tokens) :].tolist()]


def test_native_models_can_run_with_transformers_code(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = []
    for implementation in ("native", "transformers"):
        runner = make_runner(tiny_folder, implementation=implementation, kv="f32")
        assert isinstance(runner.model.decoder, CpuDecoder if implementation == "native" else TransformersDecoder)
        driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
        driver.step([driver.sequence(0, prompt(40))], [(0, 0, 40)])
        logits.append(recorder.logits[0])
    assert is_close(logits[1], logits[0])


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_int8_weights_are_kept_as_integers(
    tiny_folder: Path, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both implementations use the same weight values as the CPU kernels."""
    logits = []
    for settings in ({"kernels": "native"}, {"kernels": "torch", "implementation": implementation}):
        runner = make_runner(tiny_folder, weights="int8", kv="f32", activations="f32", **settings)
        driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
        driver.step([driver.sequence(0, prompt(40))], [(0, 0, 40)])
        logits.append(recorder.logits[0])
    kept = vars(runner.model.decoder)
    is_native = implementation == "native"
    weights = kept["_layers"][0].attention.qkv if is_native else kept["_model"].model.layers[0].mlp.up_proj
    assert weights.weight.dtype == torch.int8
    scale = float(logits[0].abs().max())
    # With transformers' implementation, the embedding table is not quantized.
    limit = TOLERANCE if implementation == "native" else 0.05
    assert float((logits[1] - logits[0]).abs().max()) <= limit * scale


def test_int8_rows_by_hand() -> None:
    units, scale = int8_rows(torch.tensor([[1.27, -0.5], [0.0, 0.0]]))
    assert units.tolist() == [[127, -50], [0, 0]]
    assert scale.tolist() == pytest.approx([0.01, 0.0])


def test_reported_hidden_states_of_gemma3n_are_the_active_ones(tmp_path: Path) -> None:
    name, settings = FAMILIES["gemma3n"]
    model: Any = make_tiny_model(tmp_path, name, **settings)
    driver = Driver(make_runner(tmp_path, implementation="transformers"))
    tokens, outputs = prompt(20), OutputParams(hidden_states=((1, True), (4, True)))
    both = [driver.sequence(0, prompt(9)), driver.sequence(1, tokens, outputs=outputs)]
    found = {item.name: torch.from_numpy(item.values) for item in driver.step(both, [(0, 0, 9), (1, 0, 20)]).tensors}
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert is_close(found["context_hidden_states.1"], states[1][model.config.altup_active_idx, 0])
    assert is_close(found["context_hidden_states.4"], states[4][0])


def test_virtual_tokens_do_not_change_the_inputs_of_other_sequences(tmp_path: Path) -> None:
    name, settings = FAMILIES["gemma3n"]
    model: Any = make_tiny_model(tmp_path, name, **settings)
    driver = Driver(make_runner(tmp_path, implementation="transformers"))
    tokens, vocab_size = prompt(20), model.config.vocab_size
    table = np.ones((2, model.config.hidden_size), np.float32)
    soft = replace(driver.sequence(0, [vocab_size, vocab_size + 1, 5]), prompt_table=table)
    beside = driver.sequence(1, tokens, outputs=OutputParams(context_logits=True))
    (found,) = driver.step([soft, beside], [(0, 0, 3), (1, 0, 20)]).tensors
    with torch.no_grad():
        assert is_close(torch.from_numpy(found.values), model(torch.tensor([tokens])).logits[0])


def test_reports_equal_transformers(gemma2: tuple[torch.nn.Module, Path]) -> None:
    model, folder = gemma2
    driver = Driver(make_runner(folder, implementation="transformers"))
    tokens = prompt(20)
    outputs = OutputParams(context_logits=True, hidden_states=((0, True), (2, True), (3, True)))
    found: dict[str, Tensor] = {}
    for tensor in driver.step([driver.sequence(0, tokens, outputs=outputs)], [(0, 0, 20)]).tensors:
        found[tensor.name] = torch.from_numpy(tensor.values)
    with torch.no_grad():
        answer = model(torch.tensor([tokens]), output_hidden_states=True)
    assert is_close(found["context_logits"], answer.logits[0])
    for layer in (0, 2, 3):
        assert is_close(found[f"context_hidden_states.{layer}"], answer.hidden_states[layer][0])


def test_a_lora_adapter_is_refused_as_it_is_read(gemma2: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    model, folder = gemma2
    make_lora(model, tmp_path / "lora", seed=1, r=4, target_modules=["q_proj"])
    runner = make_runner(folder, implementation="transformers")
    with pytest.raises(
        UnsupportedError, match="LoRA is not supported for a model that uses the transformers implementation"
    ):
        runner.adapters.load(str(tmp_path / "lora")).result()
    assert runner.adapters.device_bytes == 0


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Mamba", {}, "MambaForCausalLM does not compute its layers through"),
        ("GptOss", {"num_local_experts": 2, "max_position_embeddings": 131072}, "brings s_aux"),
        ("Falcon", {"pad_token_id": 0}, "FalconForCausalLM does not .* attention interface, so"),
        ("Falcon", {"pad_token_id": 0, "alibi": True}, "FalconForCausalLM does not .* and adds ALiBi biases, so"),
        ("Bloom", {}, "BloomForCausalLM does not .* and adds ALiBi biases, so"),
        # Each layer has attention and a convolution with recurrent state.
        (
            "FalconH1",
            {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 12, "num_hidden_layers": 1},
            "'falcon_h1' passes something from token to token outside of its attention",
        ),
        ("RobertaPreLayerNorm", {"is_decoder": True}, "'roberta-prelayernorm' does not count positions from 0"),
        # Queries and keys come from a convolution over tokens.
        (
            "Zaya",
            {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 48},
            "'zaya' passes something from token to token outside of its attention",
        ),
    ],
)
def test_settings_with_wrong_results_are_rejected(
    family: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, family, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512} | config))
    with pytest.raises(UnsupportedError, match=reason):
        make_runner(tmp_path, implementation="transformers")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "OPT", ffn_dim=96, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"missing keys: model\.decoder\.layers\.2"):
        make_runner(tmp_path, implementation="transformers")


def test_models_without_native_code_use_that_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the native implementation is requested, the model is rejected. Such models cannot be sharded across ranks."""
    make_tiny_model(tmp_path, "Olmo")
    with caplog.at_level(logging.INFO):
        make_runner(tmp_path)
    assert "uses the transformers implementation with paged attention: model: architecture 'olmo'" in caplog.text
    with pytest.raises(UnsupportedError, match="'olmo'"):
        make_runner(tmp_path, implementation="native")
    config = WorkerConfig(device="cpu", num_threads=1, tensor_parallel=2)
    with pytest.raises(
        UnsupportedError, match="uses the transformers implementation cannot be sharded across ranks"
    ) as raised:
        load_model(config, open_model_folder(str(tmp_path)), cast("RankCommunicator", SimpleNamespace(ranks=ALONE)))
    assert raised.value.field == "model"


def recorded_over(runner: ModelRunner, make_recorder: Any, device: torch.device = CPU) -> GraphDecoder:
    return GraphDecoder(
        runner.model.decoder,
        device,
        max_batch_size=4,
        max_num_tokens=32,
        max_blocks=8,
        make_recorder=make_recorder,
        may_fail=True,
    )


@pytest.mark.parametrize("family", ["gemma2", "gemma3n", "gpt_neox", "opt", "gpt2"])
def test_steps_that_read_nothing_back_are_recorded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses tensors without values: reading a value raises an error, and so does mixing these tensors with CPU
    tensors.
    """
    name, settings = FAMILIES[family]
    make_tiny_model(tmp_path, name, **settings)
    runner = make_runner(tmp_path, implementation="transformers", max_kv_tokens=64)
    decoder = cast("TransformersDecoder", runner.model.decoder)
    decoder._model.to(META)
    monkeypatch.setattr(decoder, "_device", META)
    monkeypatch.setattr(kernels, "store_kv", lambda *tensors, scales: [on_meta(tensor) for tensor in tensors])
    monkeypatch.setattr(kernels, "paged_attention", lambda q, *tensors, **_: on_meta(q).new_empty(q.shape))
    num_recorded = 0

    def record(run: Any) -> Any:
        nonlocal num_recorded
        num_recorded += 1
        run_on_one_device(run)
        return run

    graphs = recorded_over(runner, lambda: record, META)
    graphs.use_cache(KvCache(decoder.description, 4, 16, torch.float32, META))
    graphs.capture()
    # These are decode steps of 1, 2 and 4 rows, and mixed steps of 32 tokens.
    assert num_recorded == 4


def on_meta(tensor: Tensor) -> Tensor:
    assert tensor.device == META
    return tensor


def prompts_and_next_tokens() -> tuple[ForwardInputs, ForwardInputs]:
    prompts = step_inputs(3, 7, 7, 331)
    prompts = replace(prompts, token_ids=torch.arange(21, dtype=torch.int32), block_tables=TABLES)
    prompts = replace(prompts, slot_mapping=(TABLES[:, :1] * 16 + torch.arange(7, dtype=torch.int32)).flatten())
    following = step_inputs(3, 1, 8, 331)
    following = replace(following, token_ids=torch.tensor([9, 8, 7], dtype=torch.int32), block_tables=TABLES)
    return prompts, replace(following, slot_mapping=TABLES[:, 0] * 16 + 7)


def test_a_quantized_cache_gives_close_logits(gemma2: tuple[torch.nn.Module, Path]) -> None:
    """The scales are stored separately, as on a GPU."""
    runner = make_runner(gemma2[1], implementation="transformers")
    logits = []
    for dtype in (torch.float32, torch.float8_e4m3fn):
        graphs = recorded_over(runner, None)
        graphs.use_cache(KvCache(runner.model.description, 24, 16, dtype, CPU))
        logits.append([graphs.forward(inputs).clone() for inputs in prompts_and_next_tokens()])
    for exact, rounded in zip(*logits, strict=True):
        assert not torch.equal(exact, rounded)
        assert (rounded - exact).norm() < exact.norm() / 16


def test_recorded_steps_equal_those_that_run_eagerly(gemma2: tuple[torch.nn.Module, Path]) -> None:
    runner = make_runner(gemma2[1], implementation="transformers")
    logits = []
    for make_recorder in (None, lambda: lambda run: run):
        graphs = recorded_over(runner, make_recorder)
        graphs.use_cache(KvCache(runner.model.description, 24, 16, torch.float32, CPU))
        graphs.capture()
        logits.append([graphs.forward(inputs).clone() for inputs in prompts_and_next_tokens()])
        assert (graphs.best(3) is None) == (make_recorder is None)
    assert torch.equal(logits[0][0], logits[1][0])
    assert torch.equal(logits[0][1], logits[1][1])


def test_the_warm_up_compiles_every_kernel_that_random_steps_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the test of test_jit_keys.py with transformers' implementation and without graphs."""
    make_tiny_model(tmp_path, "Llama", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    keys = trace(monkeypatch)
    config = WorkerConfig(
        device="cpu",
        kernels="torch",
        implementation="transformers",
        cuda_graphs=False,
        max_batch_size=NUM_ROWS,
        max_num_tokens=MOST_TOKENS,
        max_kv_tokens=NUM_ROWS * BLOCKS_EACH * 16,
        max_sequence_length=BLOCKS_EACH * 16,
        num_threads=1,
    )
    runner = ModelRunner(config, open_model_folder(str(tmp_path)), runs_ahead=True)
    assert {"_store", "attend", "combine", "decode", "_draw"} <= {name for name, _ in keys.seen}
    assert new_keys(keys, runner, 60) == []


def test_a_model_that_reads_back_runs_without_graphs(
    gemma2: tuple[torch.nn.Module, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Recording is tried once, when the worker warms up; the log says why it failed."""
    runner = make_runner(gemma2[1], implementation="transformers")
    assert runner.model.can_record is None
    num_tried = 0

    def record(run: Any) -> Any:
        nonlocal num_tried
        num_tried += 1
        run()
        raise RuntimeError("called a synchronizing CUDA operation\nat some place")

    graphs = recorded_over(runner, lambda: record)
    for _ in range(2):
        graphs.use_cache(KvCache(runner.model.description, 24, 16, torch.float32, CPU))
        graphs.capture()
    assert num_tried == 1
    assert "without CUDA graphs, because they cannot be recorded: called a synchronizing CUDA operation" in caplog.text
    inputs = replace(step_inputs(3, 7, 7, 331), block_tables=TABLES)
    assert graphs.forward(inputs).isfinite().all()
    assert graphs.best(3) is None


def test_a_waiting_model_of_ours_is_an_error(gemma2: tuple[torch.nn.Module, Path]) -> None:
    runner = make_runner(gemma2[1], implementation="transformers")

    def record(run: Any) -> Any:
        raise RuntimeError("called a synchronizing CUDA operation")

    graphs = recorded_over(runner, lambda: record)
    graphs._may_fail = False
    graphs.use_cache(KvCache(runner.model.description, 24, 16, torch.float32, CPU))
    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs.capture()


def test_every_such_family_of_the_table_is_tested() -> None:
    tested = {getattr(transformers, f"{name}Config").model_type for name, _ in FAMILIES.values()}
    listed = {name for item in SERVED_FAMILIES if not item.is_own and not item.is_encoder for name in item.types}
    assert listed <= tested
