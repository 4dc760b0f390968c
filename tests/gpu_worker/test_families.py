"""Every natively implemented family, as tiny random models: compared with transformers, and across batches."""

from __future__ import annotations

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import module_paths
from gpu_worker.lora.inputs import VirtualTokens
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import ForwardInputs, PartDecoder, TorchDecoder
from gpu_worker.models.families import FAMILIES, describe, family_of
from gpu_worker.models.layers.rotary import rotary_table
from gpu_worker.models.native import CpuDecoder
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import Shard, shard_of
from gpu_worker.parallel.shard_weights import ShardWeights
from gpu_worker.parallel.tensor_ranks import TensorRanks
from gpu_worker.worker import features_of
from kernels import dispatch
from kernels import triton as operations
from midstream.model.families import SERVED_FAMILIES
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.adapters import adapted, make_lora, ref_of
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.test_models import Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model

# Tolerance relative to the largest logit.
TOLERANCE = 1e-4
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WINDOW = {"use_sliding_window": True, "sliding_window": 24}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
# The norms of latent attention do not use `rms_norm_eps`.
LATENT = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "rms_norm_eps": 0.01,
}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24}
LLAMA4 = {
    "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2,
    "num_hidden_layers": 4, "attention_chunk_size": 32, "floor_scale": 16, "no_rope_layer_interval": 2,
}  # fmt: skip
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
    "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
CONVOLVED = ["conv", "full_attention", "conv"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12}
# The family's name in transformers and the settings of the tiny model, by the name of the test case.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_biased": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, **WINDOW, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, **WINDOW, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    # transformers ignores this soft cap.
    "gemma3_text": ("Gemma3Text", {**GEMMA, "sliding_window_pattern": 3, "attn_logit_softcapping": 5.0}),
    # In the config.json of this family, the settings of the language model are in text_config.
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**GEMMA, "sliding_window_pattern": 3, "tie_word_embeddings": True},
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
    "idefics3": (
        "Idefics3",
        {
            "text_config": {"model_type": "llama", "pad_token_id": 0},
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        },
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.75, "sliding_window": 24, "pad_token_id": 0}),
    "phi3_long": (
        "Phi3",
        {
            "pad_token_id": 0,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0},
    ),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "deepseek_v3": ("DeepseekV3", {**GROUPED, **LATENT, "q_lora_rank": 24}),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        {
            **GROUPED,
            **LATENT,
            "q_lora_rank": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama4_text": ("Llama4Text", LLAMA4),
    "smollm3": ("SmolLM3", {**WINDOW, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "cohere2": ("Cohere2", {"sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 0.5}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("Qwen3_5Text", DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "head_dim": 16, "ssm_state_size": 12, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40, "time_step_min": 0.3,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_groups": 1,
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
            "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0,
        },
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybrid",
        {
            **MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_groups": 2,
            "num_local_experts": 0, "shared_intermediate_size": 40, "position_embedding_type": "rope",
        },
    ),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 2, "mamba_n_groups": 2}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 32}),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "minimax_m2": (
        "MiniMaxM2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **MAMBA, "mamba_d_ssm": 128, "mamba_n_groups": 2, "num_hidden_layers": 2, "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.8, 0.9, 1.1, 1.2, 1.3], "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 0.6,
            "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7, "key_multiplier": 0.5,
            "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
        },
    ),
    "falcon_h1_normed": (
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "arcee": ("Arcee", {}),
    "dots1": ("Dots1", {**GROUPED, "sliding_window": 24, "max_window_layers": 1, "norm_topk_prob": True}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
            "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0,
        },
    ),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "gpt2": ("GPT2", {"n_positions": 512}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mamba": ("Mamba", {"state_size": 12, "time_step_rank": 5}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox_in_turn": ("GPTNeoX", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "falcon": ("Falcon", {}),
    "falcon_new": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_rw": ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "mpt": ("Mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 512}),
    "lfm2": ("Lfm2", {"layer_types": CONVOLVED, "block_multiple_of": 16}),
    "lfm2_moe": ("Lfm2Moe", {**EXPERTS, "layer_types": CONVOLVED, "num_dense_layers": 1, "conv_bias": True}),
}  # fmt: skip

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
CLIP, SIDES = {"model_type": "clip_vision_model"}, {"image_size": [28, 28], "patch_size": [14, 14]}
# Other values of `model_type`, and families that differ little from others. By default, only their logits are tested;
# with TEST_ALL_FAMILIES=1, everything is.
OTHER_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4",
        {
            "text_config": LLAMA4,
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
    "qwen3_5": ("Qwen3_5", {"text_config": DELTA_NET, "vision_config": VISION}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"text_config": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40}, "vision_config": VISION},
    ),
    "smolvlm": ("SmolVLM", MODELS["idefics3"][1]),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "q_lora_rank": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 3},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "ministral": ("Ministral", {"sliding_window": 24, "layer_types": WINDOWED, "head_dim": 32}),
    "solar_open": ("SolarOpen", {**GROUPED, "head_dim": 32}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "sliding_window": 24,
            "layer_types": WINDOWED,
        },
    ),
    "cwm": ("Cwm", {"head_dim": 32, "sliding_window": 24}),
    "helium": ("Helium", {"head_dim": 16}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 7, "num_experts_per_tok": 3, "pad_token_id": 0}),
    # With images: tests/gpu_worker/test_images.py.
    "llava": ("Llava", {"text_config": {"model_type": "llama"}, "vision_config": {**TOWER, **CLIP}}),
    "llava_next": ("LlavaNext", {"text_config": {"model_type": "qwen2"}, "vision_config": {**TOWER, **CLIP}}),
    "mistral3": (
        "Mistral3",
        {"text_config": {"model_type": "mistral", "head_dim": 32}, "vision_config": {**TOWER, "model_type": "pixtral"}},
    ),
    "internvl": (
        "InternVL",
        {"text_config": {"model_type": "qwen3", "head_dim": 32}, "vision_config": {**TOWER, **SIDES}},
    ),
    # transformers has no such model type; the files have the format of DeepSeek-V3.
    "kimi_k2": MODELS["deepseek_v3"],
}  # fmt: skip


@pytest.fixture(scope="module", params=[*MODELS, *OTHER_TYPES] if os.environ.get("TEST_ALL_FAMILIES") else MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in OTHER_TYPES:
        return make_model_of(request.param, folder), folder
    name, settings = MODELS[request.param]
    return make_tiny_model(folder, name, **settings), folder


def make_model_of(model_type: str, folder: Path) -> torch.nn.Module:
    """Write a model of this type, from `OTHER_TYPES`, to `folder`."""
    name, settings = OTHER_TYPES[model_type]
    model = make_tiny_model(folder, name, **settings)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return model


@pytest.fixture(scope="module")
def runner(made: tuple[torch.nn.Module, Path]) -> ModelRunner:
    return make_runner(
        made[1], implementation="native", kv="f32", max_batch_size=33, max_kv_tokens=4096, max_sequence_length=160
    )


def logits_of(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, tokens: list[int], chunk: int, beside: int = 0, first: int = 0
) -> tuple[list[Tensor], list[int]]:
    """Prefill in chunks and decode twice, in a batch with other sequences; return the three tokens and their logits.

    `first` is the size of the first chunk if it differs from `chunk`.
    """
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    rows = range(1, 1 + beside)
    if beside:
        others = [driver.sequence(row, prompt(3 + row % 5, seed=row)) for row in rows]
        driver.step(others, [(row, 0, len(driver.tokens[row])) for row in rows])
    new = [driver.sequence(0, tokens)]
    starts = [0, *range(first or chunk, len(tokens), chunk)]
    for start, end in itertools.pairwise([*starts, len(tokens)]):
        driver.step(new, [(0, start, end - start)], generation=rows)
        new = []
    last = [recorder.logits[-1][:1]]
    for _ in range(2):
        driver.step(generation=[0, *rows])
        last.append(recorder.logits[-1][:1])
    monkeypatch.undo()
    return last, driver.output(0)


def test_logits_are_those_of_transformers_and_their_bits_depend_on_the_tokens_alone(
    made: tuple[torch.nn.Module, Path], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(70, seed=1)
    whole, chosen = logits_of(runner, monkeypatch, tokens, 70)
    wanted = expected_logits(made[0], tokens + chosen[:2])[69:72]
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert float((torch.cat(whole) - wanted).abs().max()) <= limit
    best = wanted.topk(2, dim=-1).values
    for row in range(3):
        if float(best[row, 0] - best[row, 1]) > 2 * limit:
            assert chosen[row] == int(wanted[row].argmax())
    # Most of the time is spent on steps of one token. From position 45 on, they pass all kinds of boundaries: of
    # blocks, of chunks of 32 keys, and of attention windows.
    for chunk, beside, first in ((1, 0, 45), (7, 0, 0), (64, 0, 0), (70, 31, 0)):
        others, same = logits_of(runner, monkeypatch, tokens, chunk, beside, first)
        assert same == chosen
        assert all(torch.equal(a, b) for a, b in zip(whole, others, strict=True)), (chunk, beside)


@pytest.mark.parametrize("model_type", OTHER_TYPES)
def test_logits_of_other_types_are_those_of_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make_model_of(model_type, tmp_path), prompt(40, seed=1)
    runner = make_runner(tmp_path, implementation="native", kv="f32")
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, tokens)], [(0, 0, 40)])
    wanted = expected_logits(model, tokens)[-1:]
    assert float((recorder.logits[-1] - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_a_cached_prefix_gives_the_same_bits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prompt(48, seed=2)
    tokens = first + prompt(9, seed=3)
    whole, chosen = logits_of(runner, monkeypatch, tokens, len(tokens))
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(1, first)], [(1, 0, 48)])
    driver.step([driver.sequence(0, tokens, shared_blocks=driver.blocks[1][:3])], [(0, 48, 9)])
    assert torch.equal(recorder.logits[-1], whole[0])
    assert driver.output(0) == chosen[:1]


def kill_requests() -> list[pb.GenerateRequest]:
    """Return a greedy and a seeded request, whose prompts fill more than one block."""
    samplings = (pb.SamplingConfig(temperature=0), pb.SamplingConfig(temperature=1, seed=5, repetition_penalty=1.2))
    return [
        pb.GenerateRequest(
            request_id=f"r{i}",
            token_ids=pb.TokenIds(values=prompt(20 + i, seed=8)),
            max_tokens=4,
            sampling=sampling,
            output=pb.OutputConfig(log_probs=0),
        )
        for i, sampling in enumerate(samplings)
    ]


def test_the_loss_of_the_worker_after_any_step_changes_no_bits(runner: ModelRunner) -> None:
    """By default one run loses its worker three times: during the prefill, after it, and after a decode step. With
    TEST_ALL_KILLS=1 there is a run for each step, and tests/faults/test_kill_at_every_step.py kills the real
    components with every model of `MODELS`.
    """
    system = CoreWithRunners(runner, (), max_context_chunk=16)
    undisturbed = [contents(found) for found in system.run(kill_requests())]
    num_steps = len(system.stats)
    assert num_steps >= 5
    every = [(number,) for number in range(1, num_steps)]
    for numbers in every if os.environ.get("TEST_ALL_KILLS") else [(1, 2, 3)]:
        system = CoreWithRunners(runner, (), max_context_chunk=16)
        made = [system.submit(request) for request in kill_requests()]
        for number in numbers:
            for _ in range(number):
                assert system.step()
            for pool in (runner.kv.keys, runner.kv.values, runner.kv.states):
                pool.fill_(0.5)  # the next worker's blocks have other contents
            system.lose_worker()
        system.run([])
        assert [contents(found) for found in made] == undisturbed


def forward(decoder: PartDecoder, shard: Shard, tokens: list[int], virtual: VirtualTokens | None = None) -> Tensor:
    """Return the logits of the last token of a prompt, computed by a decoder with a new cache."""
    decoder.use_cache(KvCache(shard.part, 8, 16, torch.float32, torch.device("cpu")))
    length = len(tokens)
    inputs = ForwardInputs(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.arange(length, dtype=torch.int32),
        slot_mapping=torch.arange(length, dtype=torch.int32),
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(8, dtype=torch.int32)[None],
        sampled=torch.tensor([length - 1], dtype=torch.int32),
        virtual=virtual,
    )
    return decoder.forward(inputs)


class ThreadRanks:
    """Tensor-parallel ranks as threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=240)
        self._parts: list[Tensor] = [torch.empty(0)] * size

    def rank(self, number: int) -> TensorRanks:
        """Return the interface that the decoder of a rank uses."""
        return ThreadRank(self, number)

    def gather(self, number: int, x: Tensor) -> list[Tensor]:
        """Return the concatenation of x from all ranks."""
        self._parts[number] = x
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


class ThreadRank:
    def __init__(self, ranks: ThreadRanks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._ranks.gather(self._number, x)).sum(0)

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(self._ranks.gather(self._number, x), dim=-1)


def on_two_tensor_ranks(
    path: Path, tokens: list[int], virtual: VirtualTokens | None = None, *, expert_parallel: bool = False
) -> Tensor:
    """Return the logits of the last token of a prompt, computed by two tensor-parallel ranks."""
    folder, ranks = open_model_folder(str(path)), ThreadRanks(2)

    def run(number: int) -> Tensor:
        whole = describe(folder.config)
        shard = shard_of(whole, Ranks(rank=number, world_size=2, tensor_size=2), expert_parallel=expert_parallel)
        weights = ShardWeights(DecoderWeights(folder, whole, "auto"), shard)
        decoder = TorchDecoder(whole, weights, torch.float32, torch.device("cpu"), shard, ranks.rank(number))
        with torch.inference_mode():
            return forward(decoder, shard, tokens, virtual)

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(run, range(2))
    return found


def test_two_tensor_ranks_give_the_logits_of_transformers(
    made: tuple[torch.nn.Module, Path],
) -> None:
    tokens = prompt(40, seed=5)
    wanted, has_experts = (
        expected_logits(made[0], tokens)[-1:],
        any(describe(open_model_folder(str(made[1])).config).mixtures),
    )
    for expert_parallel in (False, True) if has_experts else (False,):
        found = on_two_tensor_ranks(made[1], tokens, expert_parallel=expert_parallel)
        assert float((found - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_two_tensor_ranks_scale_virtual_tokens_as_transformers_does(tmp_path: Path) -> None:
    family, settings = MODELS["granite"]
    model, tokens = make_tiny_model(tmp_path, family, **settings), prompt(20, seed=5)
    table = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    found = on_two_tensor_ranks(tmp_path, tokens, VirtualTokens(torch.arange(5), table))
    with torch.no_grad():
        real = model.get_input_embeddings()(torch.tensor(tokens[5:]))  # type: ignore[operator]
        wanted = model(inputs_embeds=torch.cat((table, real))[None]).logits[0, -1:]
    assert float((found - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_lora_gives_the_logits_of_peft(
    made: tuple[torch.nn.Module, Path], runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter modifies every linear layer except those of mixtures of experts."""
    d = runner.model.description
    of_ffn = {"gate", "up", "down", "shared_gate", "shared_up", "shared_down"} if any(d.mixtures) else set()
    targets = [path.rpartition(".")[2] for path, modules in module_paths(d).items() if of_ffn.isdisjoint(modules)]
    settings: dict[str, Any] = {"target_modules": targets, "exclude_modules": ".*vision_(tower|model).*"}
    # transformers sums the logarithms of decays over a chunk, which is inaccurate if an adapter makes the step sizes
    # large.
    alpha = 2 if d.state_size else 8
    make_lora(made[0], tmp_path / "lora", seed=1, r=4, lora_alpha=alpha, **settings)
    tokens = prompt(30, seed=6)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([replace(driver.sequence(0, tokens), lora=ref_of(runner, tmp_path / "lora"))], [(0, 0, 30)])
    with adapted(made[0], tmp_path / "lora") as model:
        wanted = expected_logits(model, tokens)[-1:]
    plain = expected_logits(made[0], tokens)[-1:]
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert float((recorder.logits[-1] - wanted).abs().max()) <= limit
    assert float((plain - wanted).abs().max()) > 100 * limit


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("qwen2_moe", "mlp.experts"),
        ("mixtral", "mlp.experts"),
        ("gpt_oss", "mlp.experts"),
        ("llama4_text", "feed_forward.experts"),
        ("deepseek_v3", "mlp.experts"),
        ("nemotron_h", "mixer.experts"),
    ],
)
def test_lora_on_experts_gives_the_logits_of_peft(
    name: str, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter modifies both parameters of all experts, the shared expert, and dense layers."""
    family, settings = MODELS[name]
    model = make_tiny_model(tmp_path, family, **settings)
    runner = make_runner(tmp_path, implementation="native", kernels="torch")
    inner = "up_proj" if name == "nemotron_h" else "gate_up_proj"
    target: dict[str, Any] = {"target_parameters": [f"{experts}.{inner}", f"{experts}.down_proj"]}
    target["target_modules"] = ["q_proj"] if name in ("mixtral", "gpt_oss") else ["up_proj", "down_proj"]
    if name == "deepseek_v3":  # PEFT itself converts these modules to parameters, and chooses their ranks
        target = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    make_lora(model, tmp_path / "lora", seed=1, r=4, lora_alpha=8, scale=0.1, **target)
    tokens = prompt(30, seed=6)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    new = [replace(driver.sequence(0, tokens), lora=ref_of(runner, tmp_path / "lora")), driver.sequence(1, tokens)]
    driver.step(new, [(0, 0, 30), (1, 0, 30)])
    plain = expected_logits(model, tokens)[-1:]
    with adapted(model, tmp_path / "lora") as changed:
        wanted = expected_logits(changed, tokens)[-1:]
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert float((recorder.logits[-1] - torch.cat((wanted, plain))).abs().max()) <= limit
    assert float((plain - wanted).abs().max()) > 100 * limit


def test_lora_on_experts_with_tensors_of_their_own_gives_the_logits_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older adapter files have two tensors for each matrix of each expert; PEFT converts them."""
    family, settings = MODELS["mixtral"]
    model = make_tiny_model(tmp_path, family, **{**settings, "num_hidden_layers": 2})
    generator = torch.Generator().manual_seed(1)
    sizes = {"w1": (64, 96), "w2": (96, 64), "w3": (64, 96)}
    tensors = {}
    for layer, expert, (name, (inputs, outputs)) in itertools.product(range(2), range(4), sizes.items()):
        path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        tensors[f"{path}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.1
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.1
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": [*sizes]}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    runner, tokens = make_runner(tmp_path, implementation="native", kernels="torch"), prompt(30, seed=6)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([replace(driver.sequence(0, tokens), lora=ref_of(runner, tmp_path / "lora"))], [(0, 0, 30)])
    plain = expected_logits(model, tokens)[-1:]
    with adapted(model, tmp_path / "lora") as changed:
        wanted = expected_logits(changed, tokens)[-1:]
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert float((recorder.logits[-1] - wanted).abs().max()) <= limit
    assert float((plain - wanted).abs().max()) > 100 * limit


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    family, settings = MODELS["qwen2_moe"]
    make_tiny_model(folder, family, **{**settings, "moe_intermediate_size": 64})
    return folder


@pytest.mark.parametrize("weights", ["bf16", "int8", "q4"])
def test_experts_are_kept_in_each_weight_format(mixture: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ and PyTorch kernels agree, and results do not depend on the number of threads."""
    found = [
        logits_of(
            make_runner(mixture, weights=weights, kv="f32", activations="f32", **settings), monkeypatch, prompt(40), 40
        )
        for settings in ({"kernels": "torch"}, {"kernels": "native"}, {"kernels": "native", "num_threads": 3})
    ]
    (wanted, _), (logits, _), (threaded, _) = found
    assert float((logits[0] - wanted[0]).abs().max()) <= 2 * TOLERANCE * float(wanted[0].abs().max())
    assert all(map(torch.equal, logits, threaded))


@pytest.mark.parametrize(
    ("name", "num_layers"), [("qwen2_moe", 1), ("gpt_oss", 1), ("llama4_text", 2), ("falcon_rw", 1)]
)
def test_triton_kernels_under_the_decoder_give_the_same_logits(
    name: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run in Triton's interpreter, on the GPU code path."""
    family, settings = MODELS[name]
    make_tiny_model(tmp_path, family, **{**settings, "num_hidden_layers": num_layers})
    with pytest.MonkeyPatch.context() as patch:
        wanted, _ = logits_of(make_runner(tmp_path, kernels="torch"), patch, prompt(20), 20)
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    runner = make_runner(tmp_path, kernels="torch")
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, prompt(20))], [(0, 0, 20)])
    driver.step(generation=[0])
    for found, one in zip(recorder.logits, wanted, strict=False):
        assert float((found - one).abs().max()) <= TOLERANCE * max(1.0, float(one.abs().max()))


def test_the_table_of_models_states_how_it_is_served(runner: ModelRunner) -> None:
    model, features = runner.model, features_of(runner)
    served = next(item for item in SERVED_FAMILIES if model.description.architecture in item.types)
    assert served.is_own
    assert isinstance(model.decoder, CpuDecoder) == (served.on_cpu == "CPU kernels")
    assert served.has_graphs == model.can_record
    assert served.takes_drafts == ("speculative" in features)
    assert ("recurrent_state" in features) == bool(model.description.state_size)
    assert "lora" in features


def test_every_family_of_the_table_is_tested() -> None:
    types = {getattr(transformers, f"{name}Config").model_type for name, _ in MODELS.values()}
    assert types | set(OTHER_TYPES) == {model_type for family in FAMILIES for model_type in family.types}
    assert {family_of(model_type) for model_type in types | set(OTHER_TYPES)} == set(FAMILIES)
    described = {(family.title, family.types, family.reads_gguf) for family in FAMILIES}
    assert {(item.title, item.types, item.reads_gguf) for item in SERVED_FAMILIES if item.is_own} == described


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Gemma2", ("attn_logit_softcapping", "final_logit_softcapping")),
        ("Mixtral", ("rope_parameters",)),
        ("GptOss", ("rope_parameters", "head_dim")),
        ("DeepseekV3", ("q_lora_rank", "routed_scaling_factor", "n_group", "topk_group")),
        ("Qwen3", ("head_dim",)),
    ],
)
def test_a_setting_that_is_left_out_has_the_value_that_transformers_gives_it(
    name: str, settings: tuple[str, ...]
) -> None:
    config = getattr(transformers, f"{name}Config")().to_dict()
    bare = {key: value for key, value in config.items() if key not in settings}
    found, wanted = describe(bare), describe(config)
    for field in ("softcap", "logits_softcap", "head_dim", "latent", "mixtures"):
        assert getattr(found, field) == getattr(wanted, field)
    (rotary, *_), (other, *_) = found.rotary, wanted.rotary
    assert rotary is not None
    assert other is not None
    tables = (rotary_table(r.settings, r.dim, 64) for r in (rotary, other))
    assert all(map(torch.equal, next(tables), next(tables)))


@pytest.mark.parametrize(
    ("name", "settings", "left_out"),
    [
        ("Qwen2", {**WINDOW, "max_window_layers": 2}, "layer_types"),
        ("Qwen2Moe", {**WINDOW, "max_window_layers": 2}, "layer_types"),
        ("SmolLM3", WINDOW, "layer_types"),
        ("SmolLM3", WINDOW, "no_rope_layers"),
        ("Llama4Text", {}, "no_rope_layers"),
    ],
)
def test_a_list_of_layers_that_is_left_out_or_empty_is_the_one_that_transformers_derives(
    name: str, settings: dict[str, Any], left_out: str
) -> None:
    config = getattr(transformers, f"{name}Config")(**settings).to_dict()
    assert describe({**config, left_out: None}) == describe({**config, left_out: []}) == describe(config)


def test_soft_caps_can_be_turned_off() -> None:
    config = transformers.Gemma2Config(attn_logit_softcapping=None, final_logit_softcapping=None).to_dict()
    described = describe(config)
    assert (described.softcap, described.logits_softcap) == (0.0, 0.0)
