"""Reads a checkpoint's quantization settings; rejects unsupported methods by name.

Without this check, a float8 tensor would be read as plain weights, and its scales would be ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from gpu_worker.models.weights.schemes import Scheme
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.safetensors_file import read_safetensors_head

_SETTINGS = ("quantization_config", "compression_config")
# Separate settings files written by AutoGPTQ, AutoAWQ and ModelOpt, and the method that each of them implies.
_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Supported weight types, under their names in the safetensors format.
_WEIGHT_TYPES = {"F64", "F32", "F16", "BF16"}
# Types that are used only for quantized weights. Integer types are not included, since masks and positions may have
# them.
_SCALED_TYPES = ("F8", "F6", "F4")
_PACKED = ("weight", "qweight", "weight_packed", "_blocks")
_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def read_scheme(folder: ModelFolder) -> Scheme | None:
    """Return how the checkpoint in `folder` is quantized; None if it is not, or if it is a GGUF file, which has a type
    for each tensor.

    Raises:
        UnsupportedError: The message names the unsupported method or setting.
        ConfigError: A setting is damaged.
    """
    if folder.weights_format != "safetensors":
        return None
    found = _settings(folder)
    if found is None:
        _refuse_unexplained(folder)
        return None
    place, settings = found
    method = _method(settings)
    check = _METHODS.get(method)
    if check is None:
        _refuse(f"{place} has the method {method!r}; supported are {', '.join(sorted(_METHODS))}")
    try:
        return Scheme(method, check(place, settings))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{place} is damaged: {error!r}", field="model") from error


def refuse_quantized(folder: ModelFolder) -> None:
    """Raise UnsupportedError if the checkpoint is quantized; for models with the transformers implementation."""
    scheme = read_scheme(folder)
    if scheme is not None:
        _refuse(f"{folder.architecture} does not run natively, so its {scheme.method!r} weights are not supported")


def _settings(folder: ModelFolder) -> tuple[str, Mapping[str, Any]] | None:
    """Return the quantization settings and where they were found."""
    for place, config in (("", folder.config), ("text_config.", folder.config.get("text_config"))):
        for name in _SETTINGS:
            settings = config.get(name) if isinstance(config, dict) else None
            if settings:
                return f"{place}{name} of config.json", settings if isinstance(settings, dict) else {"": settings}
    for name, method in _SETTINGS_FILES.items():
        if (folder.path / name).is_file():
            try:
                settings = json.loads((folder.path / name).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"{folder.path / name} is not JSON: {error}", field="model") from error
            if not isinstance(settings, dict):
                raise ConfigError(f"{folder.path / name} is not a JSON object", field="model")
            return name, {"quant_method": method, **settings}
    return None


def _method(settings: Mapping[str, Any]) -> str:
    # ModelOpt nests its settings, and older compressed-tensors files do not name the method.
    inner = settings.get("quantization")
    method = settings.get("quant_method") or ("compressed-tensors" if "config_groups" in settings else None)
    algorithm = (inner if isinstance(inner, dict) else settings).get("quant_algo")
    if method == "modelopt" or (method is None and algorithm):
        return f"modelopt {algorithm}"
    return str(method or "unknown")


def _fp8(place: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    kind = settings.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        _refuse(f"{place} has the float8 type {kind!r}; only e4m3 is supported")
    block = settings.get("weight_block_size")
    return {"block": [int(size) for size in block]} if block else {}


def _gptq(place: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("bits") not in (4, 8):
        _refuse(f"{place} has GPTQ with {settings.get('bits')} bits; supported are 4 and 8")
    if settings.get("dynamic"):
        _refuse(f"{place} has GPTQ with settings for single modules (dynamic)")
    if settings.get("pack_dtype") not in (None, "int32", "torch.int32"):
        _refuse(f"{place} has GPTQ packed into {settings['pack_dtype']} (pack_dtype); only int32 is supported")
    kind = "marlin" if settings.get("is_marlin_format") else _layout(settings, "checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        _refuse(f"{place} has GPTQ in the format {kind!r}")
    sizes = _group_sizes(place, [settings.get("group_size", -1)])
    return {**settings, "checkpoint_format": kind, "group_sizes": sizes}


def _awq(place: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    bits, version = settings.get("bits", settings.get("w_bit")), _layout(settings, "version", "gemm")
    if settings.get("backend") == "llm-awq":  # the backend implies the layout, as in transformers
        version = "llm-awq"
    if bits != 4:
        _refuse(f"{place} has AWQ with {bits} bits; only 4 is supported")
    if version != "gemm":
        _refuse(f"{place} has AWQ in the layout {version!r}; only gemm is supported")
    size = settings.get("group_size", settings.get("q_group_size", -1))
    return {**settings, "group_sizes": _group_sizes(place, [size])}


def _layout(settings: Mapping[str, Any], name: str, default: str) -> str:
    """Return the layout that `name` or, as newer files call it, `format` declares."""
    layouts = (settings.get(name), settings.get("format"), default)
    return next(str(layout).lower() for layout in layouts if layout is not None)


def _compressed(place: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    groups = settings.get("config_groups") or {}
    formats = [settings.get("format", "dense"), *(group.get("format") for group in groups.values())]
    for name in formats:
        if name is not None and name not in _FORMATS:
            _refuse(f"{place} has the format {name!r}; supported are {', '.join(_FORMATS)}")
    if settings.get("transform_config"):
        _refuse(f"{place} has a transform_config (rotated inputs)")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        _refuse(f"{place} has sparse weights ({sparsity!r})")
    found: dict[str, Any] = {}
    sizes: list[int] = []
    for group in groups.values():
        weights = group.get("weights") or {}
        is_nvfp4 = (group.get("format") or settings.get("format")) == "nvfp4-pack-quantized"
        if weights.get("group_size") is not None and not is_nvfp4:
            sizes.append(weights["group_size"])
        if weights.get("block_structure"):
            found["block"] = [int(size) for size in weights["block_structure"]]
    cache = settings.get("kv_cache_scheme") or {}
    if cache.get("num_bits", 8) != 8:
        _refuse(f"{place} has a kv_cache_scheme of {cache['num_bits']} bits; supported are 8")
    return {**found, "group_sizes": _group_sizes(place, sizes), "has_integer_kv": cache.get("type") == "int"}


def _group_sizes(place: str, sizes: Iterable[int]) -> list[int]:
    """Return the group sizes. Sizes below 1 are left out: they mean one group per row."""
    found = [size for size in sizes if size > 0]
    for size in found:
        if size % 32:
            _refuse(f"{place} has groups of {size} weights; only multiples of 32 are supported")
    return found


_METHODS: dict[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt FP8": _fp8,
    # The format of each module follows from its tensors.
    "modelopt NVFP4": lambda place, settings: {},
    "modelopt W4A16_NVFP4": lambda place, settings: {},
    "modelopt MIXED_PRECISION": lambda place, settings: {},
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "mxfp4": lambda place, settings: {},
}


def _refuse_unexplained(folder: ModelFolder) -> None:
    for path in folder.weight_files:
        for name, tensor in read_safetensors_head(path).items():
            if tensor.dtype in _WEIGHT_TYPES:
                continue
            if name.endswith(_PACKED) or tensor.dtype.startswith(_SCALED_TYPES):
                _refuse(
                    f"the tensor {name} in {path.name} is of type {tensor.dtype}, but config.json declares no "
                    "quantization"
                )


def _refuse(found: str) -> NoReturn:
    raise UnsupportedError(
        f"this checkpoint's quantization is not supported: {found}; use the checkpoint in bfloat16, "
        "float16 or float32 (--weights int8 or q4 quantizes it when it is loaded), or a GGUF file",
        field="model",
    )
