"""The kind of a worker: everything that decides which tokens it gives for a request."""

from __future__ import annotations

import functools
import hashlib
import platform
from dataclasses import dataclass

import torch

import kernels
from gpu_worker.models.loader import LoadedModel
from kernels.cpu import load_library
from kernels.linear import ROW_TILE
from midstream.config import WorkerConfig
from midstream.model.folder import ModelFolder

# Increment it when a release changes the results of a setting, so that workers of both releases are told apart.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class OwnKind:
    """The fields of WorkerKind (protos/kind.proto) without the root of the weights; protobuf may not be installed."""

    model_fingerprint: str
    arithmetic: str
    description: str


def arithmetic(config: WorkerConfig, model: LoadedModel) -> dict[str, str]:
    """Return the settings that decide the bits of logits and KV blocks, in the form in which they are in effect.

    Instruction sets, PyTorch's operations and the CPU kernels differ in rounding. That rarely changes the most likely
    token, but often a sampled one.
    """
    description, is_native = model.description, model.takes_host_inputs
    activations = "int16" if is_native and config.activations == "auto" else config.activations
    settings = {
        "implementation": "transformers" if _is_from_transformers(model) else "native",
        "processor": _processor(model, config.cpu_isa),
        "dtype": _name(model.dtype),
        "weights": config.weights,
        "activations": activations if is_native or config.activations == "f8" else "",
        "kv": _name(model.kv_dtype) + " rounded" * model.rounds_kv,
        "windows": _windows(description.windows),
        "sinks": str(description.num_sink_tokens or ""),
    }
    if model.device.type == "cuda":
        settings |= {"attention": config.attention, "batch_invariant": "yes" if config.batch_invariant else ""}
    return {name: value for name, value in settings.items() if value}


def worker_kind(config: WorkerConfig, folder: ModelFolder, model: LoadedModel, tensor_size: int) -> OwnKind:
    """Return the worker's kind.

    Args:
        tensor_size: Number of ranks over which each layer is divided, on which the order of sums depends.
    """
    settings = arithmetic(config, model)
    if tensor_size > 1:
        settings["tensor_parallel"] = f"{tensor_size}{' experts' if config.expert_parallel else ''}"
    facts = (_VERSION, sorted(settings.items()), folder.tokenizer_fingerprint)
    return OwnKind(
        model_fingerprint=folder.fingerprint,
        arithmetic=hashlib.sha256(repr(facts).encode()).hexdigest()[:32],
        description=" ".join(f"{name}={value}" for name, value in settings.items())[:_MAX_TEXT],
    )


_MAX_TEXT = 256  # as scheduler/wire/worker_checks.py accepts


def _is_from_transformers(model: LoadedModel) -> bool:
    return type(model.decoder).__name__ in ("TransformersDecoder", "TransformersEncoder")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _windows(windows: tuple[int | None, ...]) -> str:
    """Return the layers' windows; the digest of a long list."""
    if len(set(windows)) <= 1:
        return str(next(iter(windows), 0) or "")
    return hashlib.sha256(repr(windows).encode()).hexdigest()[:8]


def _processor(model: LoadedModel, cpu_isa: str) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    capability = torch.backends.cpu.get_cpu_capability()  # of PyTorch, which also computes tables for the kernels
    library = load_library(cpu_isa) if model.takes_host_inputs else None
    if library is not None:
        return f"{library.isa} kernels, {capability}"
    return f"{platform.machine()} {capability} {_product()}"


@functools.cache
def _product() -> str:
    """Return a digest of the result of a matrix multiplication. PyTorch's BLAS selects its code by processor model, not
    only by instruction set, and by environment variables.
    """
    left, right = (
        (torch.arange(rows * 512) * factor % 4093).float().view(rows, 512) / 4093 - 0.5
        for rows, factor in ((ROW_TILE, 3571), (96, 2311))
    )
    return hashlib.sha256(kernels.linear(left, right).numpy().tobytes()).hexdigest()[:16]
