"""The kind of a worker's KV blocks: everything other than the tokens that determines their contents."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

import gpu_worker
import kernels
from gpu_worker.models.loader import LoadedModel
from kernels.cpu import load_library
from kernels.linear import ROW_TILE
from midstream.config import WorkerConfig
from midstream.model.folder import ModelFolder

_SUFFIXES = frozenset({".py", ".cpp", ".h"})


def block_kind(config: WorkerConfig, folder: ModelFolder, model: LoadedModel) -> str:
    """Return a key of the model, the settings, the code and the processor.

    A block of one kind is never used for another kind. Instruction sets and GPUs differ in rounding, so blocks computed
    with different ones are not equal.
    """
    seen = (model.description.windows, model.description.num_sink_tokens)
    numbers = (folder.fingerprint, config.tokens_per_block, model.dtype, model.kv_dtype, seen)
    settings = (config.weights, config.activations, config.kernels, config.implementation)
    has_product = model.device.type == "cpu" and not model.takes_host_inputs
    product = _product() if has_product else ""
    return repr(
        (numbers, settings, type(model.decoder).__name__, _code(), _processor(model.device, config.cpu_isa), product)
    )


@functools.cache
def _code() -> str:
    """Return a digest of the code that computes blocks. Unlike the version, it stays the same in releases that do not
    change this code, and differs between states of a checkout.
    """
    digest = hashlib.sha256()
    for root in (Path(gpu_worker.__file__).parent, Path(kernels.__file__).parent):
        for path in sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(root)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"{digest.hexdigest()[:32]} {torch.__version__} {version('transformers')}"


def _processor(device: torch.device, cpu_isa: str) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    library = load_library(cpu_isa)
    return f"{'reference' if library is None else library.isa} {torch.backends.cpu.get_cpu_capability()}"


def _product() -> str:
    """Return a digest of the result of a matrix multiplication. PyTorch's BLAS selects its code by processor model, not
    only by instruction set, and by environment variables.
    """
    left, right = (
        (torch.arange(rows * 512) * factor % 4093).float().view(rows, 512) / 4093 - 0.5
        for rows, factor in ((ROW_TILE, 3571), (96, 2311))
    )
    return hashlib.sha256(kernels.linear(left, right).numpy().tobytes()).hexdigest()[:16]
