from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.small_model import make_small_model
from tests.seeds.listings import tensorrt_llm

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the documentation names; a small random model replaces Llama 3."""
    home = tmp_path_factory.mktemp("seeds")
    model = home / "model"
    model.mkdir()
    make_small_model(model)
    for engine, tokenizer in (("llama-3-8b-engine", "llama-3-8b"), ("engine", "tokenizer")):
        shutil.copytree(model, home / engine, ignore=shutil.ignore_patterns(*TOKENIZER_FILES, "midstream.json", ".*"))
        (home / tokenizer).mkdir()
        for name in TOKENIZER_FILES:
            shutil.copy(model / name, home / tokenizer / name)
    _write_lora(home / "lora_weights" / "math")
    return home


@pytest.fixture
def in_folders(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run the test in these folders, with the imports that the documentation uses."""
    monkeypatch.chdir(folders)
    with tensorrt_llm():
        yield folders


def _write_lora(folder: Path) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{{}}.weight"
        tensors[name.format("A")] = torch.randn(4, 64, generator=generator)
        tensors[name.format("B")] = torch.randn(64, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
