"""Sizes of the adapter caches, computed from settings with the names of TensorRT-LLM's PEFT cache settings."""

from __future__ import annotations

import torch

from gpu_worker.kv.cache import free_memory_bytes
from gpu_worker.lora.adapter import module_layer_elements, module_shapes, padded_rank
from gpu_worker.models.description import DecoderDescription
from midstream.config import WorkerConfig
from midstream.errors import ConfigError

# Maximum bytes of an element in the files: those of float32.
_HOST_ELEMENT_BYTES = 4
_USUAL_RANK = 8


def host_cache_bytes(config: WorkerConfig, description: DecoderDescription) -> int:
    """Return the capacity of the adapter cache on the host, in bytes. Raises ConfigError if a size is negative."""
    _check_sign(config, "lora_host_cache_bytes")
    _check_sign(config, "lora_num_host_module_layer")
    units = config.lora_num_host_module_layer
    return units * module_layer_elements(description) * _HOST_ELEMENT_BYTES or config.lora_host_cache_bytes


def device_cache_bytes(
    config: WorkerConfig, description: DecoderDescription, element_bytes: int, device: torch.device
) -> int:
    """Return the capacity of the adapter cache on the device, in bytes; call it after the weights are loaded. Raises
    ConfigError if a size is out of range.
    """
    if not 0.0 <= config.lora_device_cache_percent <= 1.0:
        raise ConfigError("must be in [0, 1]", field="lora_device_cache_percent")
    _check_sign(config, "lora_num_device_module_layer")
    if config.lora_num_device_module_layer:
        return config.lora_num_device_module_layer * module_layer_elements(description) * element_bytes
    # On a GPU the memory is allocated now, and the fraction refers to the memory that would be left for the KV pool.
    left = 1.0 - config.free_memory_fraction if device.type == "cuda" else 1.0
    return int(free_memory_bytes(device) * left * config.lora_device_cache_percent)


def _check_sign(config: WorkerConfig, field: str) -> None:
    if getattr(config, field) < 0:
        raise ConfigError("must not be negative", field=field)


def usual_adapter_bytes(description: DecoderDescription, element_bytes: int) -> int:
    """Return the number of bytes that an adapter of rank 8 for all modules takes on the device."""
    elements = sum(sum(shape) for shape in module_shapes(description).values())
    return elements * padded_rank(_USUAL_RANK) * description.num_layers * element_bytes
