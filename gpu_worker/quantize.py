"""Writes a quantized copy of a model folder: `python -m gpu_worker.quantize`, run by `midstream prepare --weights`.

Matrices of linear layers are rounded to the nearest level: int4 in groups of 32 columns, each scaled to its range, in
compressed-tensors' format `pack-quantized`; int8 per row, in `int-quantized`. Embeddings, heads, routers, vectors,
matrices stored as [inputs, outputs], and everything outside the language model are not quantized.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.models.families import describe, family_of
from gpu_worker.models.families.family import Names
from gpu_worker.models.perplexity import WINDOW, first_windows, perplexity
from gpu_worker.models.weights.decoder_weights import open_weights
from gpu_worker.models.weights.progress import with_progress
from gpu_worker.models.weights.quantized import read_scheme
from midstream.errors import ConfigError, MidstreamError, UnsupportedError
from midstream.model.folder import ModelFolder, open_model_folder, staging_folder
from midstream.model.prepare.gguf_file import read_gguf_head

GROUP = 32
_SHARD_BYTES = 4 << 30
# Modules that stay unquantized in layers: small ones, and those from which single rows are read.
_LEFT_ALONE = re.compile(r"(embed|router|norm|shared_expert_gate)|\.gate$")
_INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_OWN_FILES = ("config.json", "midstream.json", "model.gguf")


def quantize_folder(source: ModelFolder, target: Path, weights: str) -> int:
    """Write a quantized copy of `source` to the new folder `target`; return the number of quantized matrices.

    Args:
        source: A model folder with unquantized safetensors files, or GGUF.
        target: The new folder, which appears once all of it is written.

    Raises:
        ConfigError: `target` exists, or a file is corrupt.
        UnsupportedError: The source is quantized in a format other than GGUF.
    """
    if target.exists():
        raise ConfigError(f"{target} already exists", field="output")
    if read_scheme(source) is not None:
        raise UnsupportedError("the model is already quantized; use the original checkpoint", field="model")
    target.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(target) as staging:
        for path in source.path.iterdir():
            if path.is_file() and path.name not in _OWN_FILES and not path.name.startswith(("model", ".")):
                shutil.copyfile(path, staging / path.name)
        count, left_alone = _write_weights(source, staging, weights)
        group = {"targets": ["Linear"], "weights": _INT4 if weights == "int4" else _INT8, "input_activations": None}
        settings = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if weights == "int4" else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": left_alone,
        }
        config = source.config | {"quantization_config": settings}
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in staging.iterdir():
            path.chmod(0o644)
    return count


def _write_weights(source: ModelFolder, folder: Path, weights: str) -> tuple[int, list[str]]:
    """Write all tensors; return the number of quantized matrices, and the modules that were not quantized."""
    description = describe(source.config)
    file, quantized, left_alone = open_weights(source, description), 0, []
    shards = _Shards(folder)
    family, names = family_of(description.architecture), file.names()
    for name in with_progress(names, len(names), f"quantizing to {weights}"):
        shape = file.shape(name)
        if _is_linear(name, shape, family.names):
            quantized += 1
            shards.add(_quantized(name, file.matrix(name).dense(), weights))
        else:
            shards.add({name: file.tensor(name)})
            if len(shape) == 2:
                left_alone.append(name.removesuffix(".weight"))
    shards.finish()
    return quantized, left_alone


class _Shards:
    """Writes safetensors files of limited size, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._size = folder, 0
        self._tensors: dict[str, Tensor] = {}
        self._owners: dict[str, str] = {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._size += sum(tensor.nbytes for tensor in tensors.values())
        if self._size > _SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        if not self._owners:
            save_file(self._tensors, self._folder / "model.safetensors", metadata={"format": "pt"})
            return
        self._write()
        index = {"metadata": {}, "weight_map": self._owners}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        name = f"model-{len(set(self._owners.values())) + 1:05}.safetensors"
        save_file(self._tensors, self._folder / name, metadata={"format": "pt"})
        self._owners |= dict.fromkeys(self._tensors, name)
        self._tensors, self._size = {}, 0


def _is_linear(name: str, shape: tuple[int, ...], names: Names) -> bool:
    """Return whether to quantize this tensor: a matrix of the language model's layers with whole groups of columns."""
    module, _, kind = name.rpartition(".")
    layer = names.layer.partition("{}")[0].removeprefix(names.prefixes[0])
    if not module.startswith(tuple(prefix + layer for prefix in names.all_prefixes)) or module.endswith(
        names.transposed
    ):
        return False
    return kind == "weight" and len(shape) == 2 and shape[1] % GROUP == 0 and not _LEFT_ALONE.search(module)


def _quantized(name: str, weight: Tensor, weights: str) -> dict[str, Tensor]:
    module = name.removesuffix(".weight")
    if weights == "int8":
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=torch.finfo(torch.bfloat16).tiny)
        return {name: (weight / scale).round().to(torch.int8), f"{module}.weight_scale": scale}
    groups = torch.unflatten(weight, 1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    # Round the scale to its stored format first, and choose levels for the rounded scale.
    scale = ((high - low) / 15).clamp(min=1e-6).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    levels = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).flatten(1)
    return {
        f"{module}.weight_packed": _packed(levels),
        f"{module}.weight_scale": scale,
        f"{module}.weight_zero_point": _packed(zero.t()).t().contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }


def _packed(levels: Tensor) -> Tensor:
    """Pack values of at most 15: [M, W] -> int32 [M, W / 8 rounded up], with the first value in the lowest bits."""
    padded = torch.nn.functional.pad(levels, (0, -levels.shape[1] % 8)).long()
    return (torch.unflatten(padded, 1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1).int()


def types_of(source: ModelFolder) -> list[str]:
    """Return the quantized types of a GGUF model's tensors, such as `Q4_1`; empty for other models."""
    if source.weights_format != "gguf":
        return []
    tensors = [entry for file in source.weight_files for entry in read_gguf_head(file).tensors.values()]
    names = {GGMLQuantizationType(entry.type).name for entry in tensors}
    return sorted(name for name in names if not re.fullmatch(r"B?F[0-9]+", name))


def main() -> int:
    """Quantize a model, and report the loss of quality.

    Returns:
        The exit code: 0, or 2 after printing the reason to standard error.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--weights", choices=("int4", "int8"), required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    arguments = parser.parse_args()
    try:
        report = _run(arguments)
    except MidstreamError as error:
        print(f"midstream prepare: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report))
    return 0


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    source = open_model_folder(arguments.source)
    count = quantize_folder(source, arguments.target, arguments.weights)
    made = open_model_folder(str(arguments.target))
    report: dict[str, Any] = {"matrices": count, "types": types_of(source)}
    pieces = first_windows(source, arguments.text, arguments.windows)
    if pieces:
        before, after = perplexity(source, pieces), perplexity(made, pieces)
        report |= {"tokens": len(pieces) * WINDOW, "before": before, "after": after}
    return report


if __name__ == "__main__":
    sys.exit(main())
