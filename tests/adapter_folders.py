"""Write adapters for the embedded model in PEFT's format without loading PEFT or a model, which would take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_LAYERS, HIDDEN, KV_SIZE = 30, 576, 192


def write_lora(folder: Path, rank: int, seed: int, scale: float = 0.15) -> Path:
    """Write a LoRA adapter for the query and value projections."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module, outputs in (("q_proj", HIDDEN), ("v_proj", KV_SIZE)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{{}}.weight"
            tensors[name.format("A")] = torch.randn(rank, HIDDEN, generator=generator) * scale
            tensors[name.format("B")] = torch.randn(outputs, rank, generator=generator) * scale
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    return _write(folder, tensors, config)


def write_prompt(folder: Path, num_virtual_tokens: int, seed: int) -> Path:
    """Write a prompt-tuning adapter."""
    table = torch.randn(num_virtual_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.1
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": num_virtual_tokens, "token_dim": HIDDEN}
    return _write(folder, {"prompt_embeddings": table}, config)


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
