"""Reads an adapter from a folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

The files are untrusted: nothing in them is executed, sizes are checked before anything is read, and settings that would
make the results differ from PEFT's are rejected by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from gpu_worker.lora.adapter import Adapter, LoraPair, expert_shapes, layer_modules, module_paths, module_shapes
from gpu_worker.lora.experts import ExpertTensors, WrongTensorError, expert_path
from gpu_worker.models.description import DecoderDescription, grouped_rows
from gpu_worker.models.families import family_of
from midstream.errors import InvalidArgumentError, UnsupportedError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# LoRA settings that are supported or do not affect inference. Any other setting that is on, such as DoRA, biases, saved
# modules or a new one, would change the results.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "target_parameters", "task_type",
    "use_rslora",
}  # fmt: skip
# A parameter in which transformers stacks all experts, in `target_parameters`.
_EXPERT_PARAMETER = re.compile(r"((.*\.)?experts\.)?(gate_up_proj|up_proj|down_proj)")
_OFF: tuple[object, ...] = (None, False, 0, "none", "", [], {})
# Initialization methods that leave the base model's weights unchanged; others (PiSSA, OLoRA, ...) change them.
_INITS: tuple[object, ...] = (None, True, False, "gaussian", "eva", "orthogonal", "lora_ga")


_NO_EXPERTS = "adapters of experts need a worker of one rank and, on a CPU, --kernels torch"
NO_LORA = "LoRA is not supported for a model that uses the transformers implementation"


def read_adapter(
    path: str,
    description: DecoderDescription,
    *,
    max_rank: int,
    max_bytes: int,
    root: str = "",
    takes_lora: bool = True,
    takes_expert_lora: bool = True,
) -> Adapter:
    """Return the adapter in the folder `path`.

    Args:
        description: The model that the adapter must fit.
        max_bytes: Maximum size of the weight file, in bytes.
        root: Folder that must contain `path`; empty means no restriction.
        takes_lora: Whether the model supports LoRA adapters and not only prompt adapters.

    Raises:
        InvalidArgumentError: A file is missing or wrong; the message names the file and the setting or tensor.
        UnsupportedError: The kind of adapter is not supported.
    """
    folder = Path(path)
    if root and not folder.resolve().is_relative_to(Path(root).resolve()):
        raise _wrong(f"{path} is outside the adapter folder")
    config_data, weights = _read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES), _read(folder / WEIGHTS_FILE, max_bytes)
    digest = hashlib.sha256(len(config_data).to_bytes(8, "little") + config_data + weights).hexdigest()[:32]
    config = _parse(folder / CONFIG_FILE, config_data)
    tensors = _tensors(folder / WEIGHTS_FILE, weights)
    kind = config.get("peft_type")
    if kind == "LORA" and not takes_lora:
        raise UnsupportedError(f"{folder / CONFIG_FILE}: {NO_LORA}", field="path")
    if kind == "LORA":
        adapter = Adapter(path, digest, layers=_Lora(folder, config, tensors, description, max_rank).layers())
        if adapter.has_experts and not takes_expert_lora:
            raise UnsupportedError(f"{folder / WEIGHTS_FILE}: {_NO_EXPERTS}", field="path")
        return adapter
    if kind == "PROMPT_TUNING":
        return Adapter(path, digest, prompt_table=_prompt_table(folder, config, tensors, description))
    raise UnsupportedError(f"{folder / CONFIG_FILE}: peft_type {kind!r} is not LORA or PROMPT_TUNING", field="path")


def _wrong(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, field="path")


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if not path.is_file():
            raise _wrong(f"{path} is missing")
        size = path.stat().st_size
        if size > max_bytes:
            raise _wrong(f"{path} has {size} bytes; must have at most {max_bytes}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise _wrong(f"{path} cannot be read: {error}") from None


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise _wrong(f"{path} is not a JSON object")
    return config


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _wrong(f"{path} is not a readable safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise _wrong(f"{path}: {name} is {tensor.dtype}; must be float32, float16 or bfloat16")
        if not torch.isfinite(tensor).all():
            raise _wrong(f"{path}: {name} contains numbers that are not finite")
    return tensors


class _Lora:
    """Extracts the pairs of a LoRA folder from its tensors."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tensors: dict[str, Tensor],
        description: DecoderDescription,
        max_rank: int,
    ) -> None:
        self._config_path, self._weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
        self._config, self._tensors, self._max_rank = config, tensors, max_rank
        self._num_layers, self._description = description.num_layers, description
        self._with_experts = [mixture is not None for mixture in description.mixtures]
        self._shapes, self._paths = module_shapes(description), module_paths(description)
        # In models of text and images, the layers are nested deeper, and in models without a head less deep.
        names = family_of(description.architecture).names
        prefixes, layer = names.all_prefixes, names.layer.removeprefix(names.prefixes[0])
        start = layer.partition("{}")[0]
        held = (p for p in prefixes if any(name.startswith(_PREFIX + p + start) for name in tensors))
        self._layer = next(held, prefixes[0]) + layer
        self._absent = {
            (i, path)
            for i in range(description.num_layers)
            for path, modules in self._paths.items()
            if layer_modules(description, i).isdisjoint(modules)
        }
        for name, value in config.items():
            is_known = name in _KNOWN and (name != "init_lora_weights" or value in _INITS)
            # PEFT sets this for layers whose matrices are stored as [inputs, outputs]; PEFT's own two matrices are
            # always stored the same way.
            is_known = is_known or (name == "fan_in_fan_out" and bool(names.transposed))
            if not is_known and value not in _OFF:
                raise UnsupportedError(f"{self._config_path}: {name} {value!r} is not supported", field="path")
        self._rank = self._number("r", config.get("r"))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha"))
        self._experts = ExpertTensors(description, tensors, _PREFIX, self._rank_and_scale)
        self._expert_modules = expert_shapes(description)
        for target in config.get("target_parameters") or []:
            if not _EXPERT_PARAMETER.fullmatch(str(target)) or not self._expert_modules:
                raise UnsupportedError(
                    f"{self._config_path}: target_parameters {target!r} is not supported, only those of experts are",
                    field="path",
                )

    def layers(self) -> tuple[Mapping[str, LoraPair], ...]:
        """Return the pairs of each layer; raise if a tensor is missing or unexpected."""
        left, layers = set(self._tensors), []
        expected = self._expected()
        for i in range(self._num_layers):
            pairs: dict[str, LoraPair] = {}
            for suffix, modules in self._paths.items():
                path = self._layer.format(i) + suffix
                names = [f"{_PREFIX}{path}.lora_{part}.weight" for part in ("A", "B")]
                if (i, suffix) in self._absent:
                    continue
                if path in expected or not left.isdisjoint(names):
                    pairs |= self._pairs(path, modules, *names)
                    left.difference_update(names)
            if self._with_experts[i]:
                pairs |= self._expert_pairs(i, left)
            layers.append(pairs)
        if left:
            raise _wrong(f"{self._weights_path}: {min(left)} does not belong to a linear layer of this model")
        if not any(layers):
            raise _wrong(f"{self._weights_path} contains no tensors")
        return tuple(layers)

    def _expert_pairs(self, layer: int, left: set[str]) -> dict[str, LoraPair]:
        """Return the pairs of a layer's experts, and remove their tensors from `left`."""
        prefix = self._layer.format(layer)
        try:
            pairs, names = self._experts.pairs(prefix)
        except WrongTensorError as error:
            raise _wrong(f"{self._weights_path}: {error}") from None
        for target in self._config.get("target_parameters") or []:
            kind = "down" if str(target).endswith("down_proj") else "up"
            is_meant = not any(part.isdigit() for part in str(target).split("."))  # no layer number: for all layers
            if f"experts_{kind}" not in pairs and is_meant:
                raise _wrong(f"{self._weights_path}: the tensors of {target} of layer {layer} are missing")
        left.difference_update(names)
        return pairs

    def _expected(self) -> set[str]:
        """Return the paths of the modules that the configuration selects."""
        targets, only = self._config.get("target_modules"), self._config.get("layers_to_transform")
        excluded = self._config.get("exclude_modules") or []
        if not isinstance(targets, list) or not isinstance(excluded, list):
            # A regular expression from an untrusted file may take forever to match, so it is not evaluated; the modules
            # are those whose tensors the weight file contains.
            return set()
        suffixes = tuple(f".{name}" for name in excluded)

        def is_excluded(path: str) -> bool:
            return f".{path}".endswith(suffixes)

        layers = range(self._num_layers) if only is None else [only] if isinstance(only, int) else only
        paths = [
            self._layer.format(i) + suffix for i in layers for suffix in self._paths if (i, suffix) not in self._absent
        ]
        expected = set()
        for target in targets:
            matched = {path for path in paths if _is_suffix(str(target), path)}
            experts = (expert_path(self._description, module, 0) for module in self._expert_modules)
            if not matched and not is_excluded(str(target)) and not any(_is_suffix(str(target), p) for p in experts):
                known = ", ".join(suffix.rpartition(".")[2] for suffix in self._paths)
                raise _wrong(f"{self._config_path}: target_modules: {target!r} must be one of {known}")
            expected |= matched
        return {path for path in expected if not is_excluded(path)}

    def _pairs(self, path: str, modules: tuple[str, ...], name_a: str, name_b: str) -> dict[str, LoraPair]:
        for name in (name_a, name_b):
            if name not in self._tensors:
                raise _wrong(f"{self._weights_path}: {name} is missing")
        a, b = self._tensors[name_a], self._tensors[name_b]
        rank, scale = self._rank_and_scale(path)
        num_inputs, sizes = self._shapes[modules[0]][0], [self._shapes[module][1] for module in modules]
        for name, tensor, shape in ((name_a, a, (rank, num_inputs)), (name_b, b, (sum(sizes), rank))):
            if tensor.shape != shape:
                raise _wrong(f"{self._weights_path}: {name} is {list(tensor.shape)}, expected {list(shape)}")
        if self._description.has_grouped_qkv and modules == ("q", "k", "v"):
            b = b[grouped_rows(self._description)]
        return {module: LoraPair(a, part, scale) for module, part in zip(modules, torch.split(b, sizes), strict=True)}

    def _rank_and_scale(self, path: str) -> tuple[int, float]:
        """Return the rank and the scale of a module's pair."""
        rank = int(self._setting("rank_pattern", path, self._rank))
        if not 1 <= rank <= self._max_rank:
            raise _wrong(f"{self._config_path}: rank {rank}; this worker supports 1 to {self._max_rank}")
        alpha = self._setting("alpha_pattern", path, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _setting(self, patterns: str, path: str, default: float) -> float:
        """Return a module's value in rank_pattern or alpha_pattern, or the default if it has none."""
        for key, value in (self._config.get(patterns) or {}).items():
            # Keys are regular expressions for the end of a path, or with ^ for the whole path; of these, only names are
            # evaluated. PEFT writes the prefix .*\. if it converts modules to parameters; without the prefix, the
            # pattern matches the same paths.
            name = key.removeprefix("^").removeprefix(r".*\.").removesuffix("$").replace(r"\.", ".")
            if not name.replace(".", "").replace("_", "").isalnum():
                raise UnsupportedError(f"{self._config_path}: {patterns}: {key!r} is not a name", field="path")
            is_whole = key.startswith("^") and not key.startswith(r"^.*\.")
            if path == name if is_whole else _is_suffix(name, path):
                return self._number(patterns, value)
        return default

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong(f"{self._config_path}: {name} is {value!r}; must be a number")
        return value


def _is_suffix(name: str, path: str) -> bool:
    return path == name or path.endswith("." + name)


def _prompt_table(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], description: DecoderDescription
) -> Tensor:
    if set(tensors) != {"prompt_embeddings"}:
        raise _wrong(f"{folder / WEIGHTS_FILE}: prompt_embeddings is missing or not the only tensor")
    table, hidden_size = tensors["prompt_embeddings"], description.hidden_size
    num_tokens = config.get("num_virtual_tokens")
    if table.dim() != 2 or not len(table) or list(table.shape) != [num_tokens, hidden_size]:
        raise _wrong(
            f"{folder / WEIGHTS_FILE}: prompt_embeddings is {list(table.shape)}, expected [{num_tokens}, {hidden_size}]"
        )
    return table.float().contiguous()
