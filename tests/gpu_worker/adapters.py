"""Adapters for tests, created by PEFT or without a model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch

from gpu_worker.batch.step import AdapterRef
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.cache import AdapterCache
from gpu_worker.model_runner import ModelRunner

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def no_adapters() -> AdapterCache[object]:
    def read(path: str) -> Adapter:
        raise AssertionError(path)

    return AdapterCache(read, lambda adapter: adapter, host_bytes=0, device_bytes=0, element_bytes=4)


def make_lora(model: torch.nn.Module, folder: Path, seed: int, scale: float = 0.25, **settings: Any) -> None:
    """Write a random LoRA adapter for `model` with PEFT, without changing the model."""
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "lora_dropout": 0.0, "init_lora_weights": False, **settings})
    _write(model, config, folder, seed, scale)


def make_prompt(model: torch.nn.Module, folder: Path, seed: int, num_virtual_tokens: int) -> None:
    """Write a random prompt adapter for `model` with PEFT."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual_tokens)
    _write(model, config, folder, seed, scale=1.0)


@contextlib.contextmanager
def adapted(model: torch.nn.Module, folder: Path) -> Iterator[torch.nn.Module]:
    """Yield the model with an adapter applied; suppress warnings from PEFT and transformers."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        made = peft.PeftModel.from_pretrained(model, folder)
        yield made
        if isinstance(made.active_peft_config, peft.LoraConfig):
            made.unload()


def _write(model: torch.nn.Module, config: peft.PeftConfig, folder: Path, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name or "prompt_encoder" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        made.save_pretrained(folder)
        if isinstance(config, peft.LoraConfig):
            made.unload()


def ref_of(runner: ModelRunner, folder: Path) -> AdapterRef:
    """Load the adapter in `folder`, and return the reference that requests need to use it."""
    return AdapterRef(folder.name, str(folder), runner.adapters.load(str(folder)).result().fingerprint)
