"""Invalid adapter folders are rejected, and the error states the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.peft_folder import read_adapter
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families import describe
from midstream.errors import InvalidArgumentError, UnsupportedError
from tests.gpu_worker.tiny_models import SHAPE

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
Q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
Tensors = dict[str, Tensor]


@pytest.fixture
def description() -> DecoderDescription:
    return describe({**SHAPE, "model_type": "llama"})


def good_tensors() -> Tensors:
    return {
        Q.format(layer, part): torch.ones(*shape)
        for layer in range(3)
        for part, shape in (("A", (4, 64)), ("B", (64, 4)))
    }


def write(folder: Path, config: object, tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, description: DecoderDescription, **limits: Any) -> Adapter:
    return read_adapter(str(folder), description, **{"max_rank": 64, "max_bytes": 1 << 20, **limits})


def test_a_good_folder(tmp_path: Path, description: DecoderDescription) -> None:
    adapter = read(write(tmp_path / "x", CONFIG, good_tensors()), description)
    assert adapter.rank == 4
    assert [sorted(pairs) for pairs in adapter.layers] == [["q"]] * 3
    assert adapter.layers[0]["q"].scale == 2.0
    assert adapter.device_bytes(4) == 3 * 8 * (64 + 64) * 4  # rank 4 is padded to 8
    again = read(write(tmp_path / "y", CONFIG, good_tensors()), description)
    assert again.fingerprint == adapter.fingerprint
    other = read(write(tmp_path / "z", {**CONFIG, "lora_alpha": 9}, good_tensors()), description)
    assert other.fingerprint != adapter.fingerprint


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def having(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, without(Q.format(1, "B")), r"adapter_model.safetensors: .*layers\.1\..*lora_B.weight is missing"),
        ({}, having(Q.format(2, "A"), torch.ones(4, 63)), r"lora_A.weight is \[4, 63\], expected \[4, 64\]"),
        ({}, having(Q.format(0, "B"), torch.ones(64, 5)), r"lora_B.weight is \[64, 5\], expected \[64, 4\]"),
        ({}, having(Q.format(3, "A"), torch.ones(4, 64)), r"layers\.3\..* does not belong to a linear layer"),
        ({}, having("lm_head.weight", torch.ones(2)), "lm_head.weight does not belong to a linear layer"),
        (
            {},
            having("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", torch.ones(4, 64)),
            r"experts\.0.* does not belong to a linear layer of this model",
        ),
        (
            {},
            having(Q.format(0, "A"), torch.full((4, 64), torch.nan)),
            "lora_A.weight contains numbers that are not finite",
        ),
        ({}, having(Q.format(0, "A"), torch.ones(4, 64, dtype=torch.int32)), "lora_A.weight is torch.int32"),
        ({"r": 8}, None, r"lora_A.weight is \[4, 64\], expected \[8, 64\]"),
        ({"r": 65}, None, "adapter_config.json: rank 65; this worker supports 1 to 64"),
        ({"r": "4"}, None, "adapter_config.json: r is '4'; must be a number"),
        ({"lora_alpha": None}, None, "lora_alpha is None; must be a number"),
        ({"target_modules": ["q_proj", "lm_head"]}, None, "target_modules: 'lm_head' must be one of q_proj, k_proj"),
        ({"target_modules": ["q_proj", "v_proj"]}, None, r"v_proj.lora_A.weight is missing"),
        (
            {"exclude_modules": ["layers.0.self_attn.q_proj", "proj", "0"]},
            without(Q.format(1, "B")),
            r"layers\.1\..*lora_B.weight is missing",
        ),
        ({"exclude_modules": ".*v_proj"}, without(Q.format(1, "B")), r"layers\.1\..*lora_B.weight is missing"),
    ],
)
def test_an_ill_shaped_adapter_is_refused_by_file_and_tensor(
    tmp_path: Path,
    description: DecoderDescription,
    config: dict[str, object],
    change: Callable[[Tensors], None] | None,
    message: str,
) -> None:
    tensors = good_tensors()
    if change is not None:
        change(tensors)
    folder = write(tmp_path / "x", {**CONFIG, **config}, tensors)
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        read(folder, description)
    assert raised.value.field == "path"
    assert str(folder) in raised.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"bias": "all"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"fan_in_fan_out": True},
        {"lora_bias": True},
        {"target_parameters": ["mlp.gate.weight"]},
        {"init_lora_weights": "pissa"},
        {"some_later_kind": {"x": 1}},
        {"peft_type": "LOHA"},
        {"rank_pattern": {"(a*)*b": 4}},
        {"alpha_pattern": {r"^layers\.\d+\.q_proj": 4}},
    ],
)
def test_adapter_settings_that_are_not_supported_are_named(
    tmp_path: Path, description: DecoderDescription, config: dict[str, object]
) -> None:
    folder = write(tmp_path / "x", {**CONFIG, **config}, good_tensors())
    with pytest.raises(UnsupportedError, match=next(iter(config))):
        read(folder, description)


def test_a_regular_expression_is_not_run(tmp_path: Path, description: DecoderDescription) -> None:
    endless = r"((\w|\.)*)*!"  # matching a module path against it would take years
    for name in ("target_modules", "exclude_modules"):
        folder = write(tmp_path / name, {**CONFIG, name: endless}, good_tensors())
        assert [sorted(pairs) for pairs in read(folder, description).layers] == [["q"]] * 3


def test_invalid_files(tmp_path: Path, description: DecoderDescription) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nowhere/adapter_config.json is missing"):
        read(tmp_path / "nowhere", description)
    folder = write(tmp_path / "x", "[1", good_tensors())
    with pytest.raises(InvalidArgumentError, match=r"adapter_config.json is not JSON"):
        read(folder, description)
    folder = write(tmp_path / "y", CONFIG, good_tensors())
    with pytest.raises(InvalidArgumentError, match=r"adapter_model.safetensors has \d+ bytes; must have at most 100"):
        read(folder, description, max_bytes=100)
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidArgumentError, match="not a readable safetensors file"):
        read(folder, description)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match=r"adapter_model.safetensors is missing"):
        read(folder, description)


def test_only_folders_below_the_root_are_read(tmp_path: Path, description: DecoderDescription) -> None:
    folder = write(tmp_path / "x", CONFIG, good_tensors())
    assert read(folder, description, root=str(tmp_path)).rank == 4
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(folder)
    for path in (folder, tmp_path / "root" / ".." / "x", tmp_path / "root" / "link"):
        with pytest.raises(InvalidArgumentError, match="outside the adapter folder"):
            read(path, description, root=str(tmp_path / "root"))


def test_a_prompt_adapter_of_another_width_is_refused(tmp_path: Path, description: DecoderDescription) -> None:
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}
    folder = write(tmp_path / "x", config, {"prompt_embeddings": torch.ones(3, 65)})
    with pytest.raises(InvalidArgumentError, match=r"prompt_embeddings is \[3, 65\], expected \[3, 64\]"):
        read(folder, description)
    folder = write(tmp_path / "y", config, {"something": torch.ones(3, 64)})
    with pytest.raises(InvalidArgumentError, match="prompt_embeddings is missing"):
        read(folder, description)


EXPERTS = "base_model.model.model.layers.0.mlp.experts.{}.weight"
OF_EXPERTS = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_parameters": ["mlp.experts.down_proj"]}


@pytest.fixture
def mixture() -> DecoderDescription:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    return describe({**SHAPE, **config, "model_type": "qwen3_moe"})


def expert_tensors(rank: int = 2) -> Tensors:
    return {
        EXPERTS.format("lora_A"): torch.arange(4.0 * rank * 32).view(4 * rank, 32),
        EXPERTS.format("lora_B"): torch.arange(64.0 * 4 * rank).view(64, 4 * rank),
    }


def test_the_pairs_of_experts(tmp_path: Path, mixture: DecoderDescription) -> None:
    adapter = read(write(tmp_path / "x", OF_EXPERTS, expert_tensors()), mixture)
    pair = adapter.layers[0]["experts_down"]
    assert (pair.rank, pair.scale) == (2, 4.0)
    assert pair.a[1].tolist() == expert_tensors()[EXPERTS.format("lora_A")][2:4].tolist()
    assert pair.b[1, 3].tolist() == [3 * 8 + 1, 3 * 8 + 4 + 1]  # the columns of b are sorted by rank
    assert adapter.device_bytes(4) == 4 * 8 * (32 + 64) * 4  # rank 2 is padded to 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERTS.format("lora_B")), "lora_B.weight is missing"),
        (having(EXPERTS.format("lora_B"), torch.ones(63, 8)), r"lora_B.weight \[63, 8\]: no parameter has this shape"),
        (having(EXPERTS.format("lora_A"), torch.ones(12, 32)), "is for rank 3 of 4 experts, not for rank 2"),
        (lambda tensors: tensors.clear(), "the tensors of mlp.experts.down_proj of layer 0 are missing"),
    ],
)
def test_tensors_of_experts_that_do_not_fit_are_named(
    tmp_path: Path, mixture: DecoderDescription, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = expert_tensors()
    change(tensors)
    with pytest.raises(InvalidArgumentError, match=message):
        read(write(tmp_path / "x", OF_EXPERTS, tensors), mixture)


def test_adapters_of_experts_are_refused_where_they_are_not_supported(
    tmp_path: Path, mixture: DecoderDescription
) -> None:
    with pytest.raises(UnsupportedError, match="adapters of experts need a worker of one rank and, on a CPU"):
        read(write(tmp_path / "x", OF_EXPERTS, expert_tensors()), mixture, takes_expert_lora=False)
