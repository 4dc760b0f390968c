from __future__ import annotations

import fcntl
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import open_model_folder
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

# PyTorch's threads would wait for each other, and more so beside other processes of tests.
torch.set_num_threads(1)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral_window": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """transformers' model and its folder, of each family."""
    name, settings = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(folder, name, **settings), folder


@pytest.fixture(scope="session")
def transformers_model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """transformers' own of the embedded model, in float32."""
    # It needs 20 s for a GGUF file, so the first of the test run's processes that wants it keeps what it has read.
    root = tmp_path_factory.getbasetemp()
    kept = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "embedded-in-float32"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _read_by_transformers(open_model_folder("smollm2").path).save_pretrained(kept)  # type: ignore[operator]
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32)
    return model


def _read_by_transformers(folder: Path) -> torch.nn.Module:
    with warnings.catch_warnings():  # its loading leaves a file to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        gc.collect()
    return model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, "Llama")
    return folder


@pytest.fixture(scope="session")
def tiny_runner(tiny_folder: Path) -> ModelRunner:
    return make_runner(tiny_folder)
