"""The kind of a worker's KV blocks: everything other than the tokens that determines their contents."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

import gpu_worker
import kernels
from gpu_worker.kind import arithmetic
from gpu_worker.models.loader import LoadedModel
from midstream.config import WorkerConfig
from midstream.model.folder import ModelFolder
from midstream.model.weight_tree import weights_identity

_SUFFIXES = frozenset({".py", ".cpp", ".h"})


def block_kind(config: WorkerConfig, folder: ModelFolder, model: LoadedModel, root: str = "") -> str:
    """Return a key of the model, the settings, the code and the processor.

    A block of one kind is never used for another kind. Instruction sets and GPUs differ in rounding, so blocks computed
    with different ones are not equal.

    Args:
        root: Root of the tree over the weights, if it has just been computed.
    """
    weights = weights_identity(folder, root)
    settings = sorted(arithmetic(config, model).items())
    return repr((weights, config.tokens_per_block, settings, type(model.decoder).__name__, _code()))


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
