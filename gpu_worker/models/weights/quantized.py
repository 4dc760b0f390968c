"""Refuses checkpoints whose numbers are stored in a form that is not computed here.

Without this a float8 tensor would be read as if its values were the weights: the scales beside it would be ignored.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NoReturn

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder

_SETTINGS = ("quantization_config", "compression_config")
# Written beside config.json by ModelOpt, AutoGPTQ and AutoAWQ.
_SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# What the safetensors format calls the types that a weight may have here.
_WEIGHT_TYPES = {"F64", "F32", "F16", "BF16"}
# Types of weights that are never whole numbers by themselves. Integers may be: masks and positions are stored too.
_SCALED_TYPES = ("F8", "F6", "F4")
_PACKED = ("weight", "qweight", "weight_packed", "_blocks")
_MAX_HEADER_BYTES = 100 << 20


def refuse_quantized(folder: ModelFolder) -> None:
    """Raise where the checkpoint in `folder` is quantized. A GGUF file is not concerned: its blocks are read.

    Raises:
        UnsupportedError: Names the method or the tensor, and says what to use in its place.
        ConfigError: A weight file is damaged.
    """
    if folder.weights_format != "safetensors":
        return
    for place, config in (("", folder.config), ("text_config.", folder.config.get("text_config"))):
        for name in _SETTINGS:
            settings = config.get(name) if isinstance(config, dict) else None
            if settings:
                _refuse(f"{place}{name} of config.json says {_method(settings)!r}")
    for name in _SETTINGS_FILES:
        if (folder.path / name).is_file():
            _refuse(f"the folder has a {name}")
    for path in folder.weight_files:
        for name, dtype in _tensor_types(path).items():
            is_packed = dtype not in _WEIGHT_TYPES and name.endswith(_PACKED)
            if is_packed or dtype.startswith(_SCALED_TYPES):
                _refuse(f"the tensor {name} in {path.name} is of type {dtype}")


def _refuse(found: str) -> NoReturn:
    raise UnsupportedError(
        f"quantized checkpoints are not supported, and {found}; use the checkpoint in bfloat16, float16 or float32 "
        "(--weights int8 or q4 quantizes it when it is loaded), or a GGUF file",
        field="model",
    )


def _method(settings: object) -> str:
    if not isinstance(settings, dict):
        return str(settings)
    return str(settings.get("quant_method") or settings.get("quant_algo") or "unknown")


def _tensor_types(path: Path) -> dict[str, str]:
    """The type of each tensor of a safetensors file, by its header alone: readers do not know every type."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
            return {name: str(entry["dtype"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}", field="model") from error
