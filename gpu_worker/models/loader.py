"""Loads a model: chooses the device, data types and kernels, and reads the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

import kernels
from gpu_worker.lora.sizes import device_cache_bytes
from gpu_worker.models.decoder import Decoder, TorchDecoder
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families import FAMILIES, describe, family_of
from gpu_worker.parallel.pipeline import as_stage
from gpu_worker.parallel.ranks import ALONE, Ranks
from gpu_worker.parallel.shard import Shard, shard_of, whole_shard
from gpu_worker.parallel.tensor_ranks import ONE_RANK
from gpu_worker.sampling.output_probes import OutputProbe
from kernels.cpu import Library, ThreadPool, load_library, supports
from kernels.quantized_kv import LARGEST
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.processors import num_compute_threads

if TYPE_CHECKING:
    from gpu_worker.parallel.communicator import RankCommunicator

logger = logging.getLogger(__name__)

_KV_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "int16": torch.int16,
    "int8": torch.int8,
    "f8": torch.float8_e4m3fn,
}
# Architectures whose outputs are neither next-token logits nor class scores for a text.
_OTHER_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM")
# Settings that have no meaning without a KV cache.
_OF_THE_CACHE = (
    "role", "draft_model", "host_kv_bytes", "disk_kv_folder", "max_attention_window", "layer_attention_windows", "kv",
)  # fmt: skip
# Minimum compute capability for float8 (Ada, Hopper).
_FLOAT8_CAPABILITY = (8, 9)
# Minimum compute capability for float8 matrix multiplication with a scale per row (Hopper).
_FLOAT8_ROWS_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, ready to run.

    Attributes:
        can_record: Whether its steps can be recorded as CUDA graphs; None if this has to be tried.
        takes_host_inputs: Whether the decoder reads a step's inputs on the host, as the CPU kernels do.
        divided: The shard that this rank holds; None for the whole model.
        adapter_bytes: Size in bytes of the memory for LoRA adapters on the device.
        rounds_kv: Whether keys and values are rounded as the checkpoint says before they are stored.
        threads: Threads of the CPU kernels for sampling; None if PyTorch samples.
        is_encoder: Whether each step must contain whole prompts, since there are no keys and values of earlier steps.
        probes: The model's own output probes, by name.
    """

    description: DecoderDescription
    decoder: Decoder
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    can_record: bool | None = True
    takes_host_inputs: bool = False
    takes_lora: bool = True
    divided: Shard | None = None
    adapter_bytes: int = 0
    rounds_kv: bool = False
    threads: ThreadPool | None = None
    is_encoder: bool = False
    probes: Mapping[str, OutputProbe] = field(default_factory=dict)

    @property
    def shard(self) -> Shard:
        """The part of the model that this rank holds."""
        return self.divided or whole_shard(self.description)

    @property
    def part(self) -> DecoderDescription:
        """Description of this rank's part as if it were a separate model."""
        return self.description if self.divided is None else self.divided.part


def load_model(config: WorkerConfig, folder: ModelFolder, communicator: RankCommunicator | None = None) -> LoadedModel:
    """Load `folder` with the settings in `config`, and choose the process's attention kernels for it.

    Raises:
        ConfigError: The device is missing, or the folder is corrupt.
        UnsupportedError: The model or a setting is not supported.
    """
    model = load_beside(config, folder, communicator)
    if not model.is_encoder:
        _choose_attention(config, model.part, model.dtype, model.kv_dtype, model.device)
    return model


def load_beside(config: WorkerConfig, folder: ModelFolder, communicator: RankCommunicator | None = None) -> LoadedModel:
    """Load `folder` as `load_model` does, but keep the attention kernels that were chosen for another model."""
    # Imported here because these modules need the packages that read weight files; code that creates models in other
    # ways does not.
    from gpu_worker.models.native import CpuDecoder
    from gpu_worker.models.weights.decoder_weights import DecoderWeights
    from gpu_worker.parallel.shard_weights import ShardWeights

    refuse_other_heads(folder)
    ranks = ALONE if communicator is None else communicator.ranks
    device = use_device(config, ranks)
    dtype = compute_dtype(config, device)
    _use_kernel_settings(config, folder, device)
    if folder.is_encoder:
        return _load_encoder(config, folder, device, dtype, communicator)
    started = time.perf_counter()
    try:
        description = _describe_native(config, folder)
    except UnsupportedError as error:
        if config.implementation == "native":
            raise
        logger.info("%s uses the transformers implementation with paged attention: %s", folder.name, error)
        return _load_fallback(config, folder, device, dtype, communicator, error)
    if description is None:
        return _load_fallback(config, folder, device, dtype, communicator)
    weights = DecoderWeights(folder, description, config.weights, rounds_kv=config.kv == "auto")
    shard = shard_of(description, ranks, expert_parallel=config.expert_parallel)
    library = _cpu_library(config, description, ranks) if device.type == "cpu" else None
    kv_dtype = _kv_dtype(config, device, dtype) if library is None else _KV_DTYPES.get(config.kv, torch.int16)
    if library is not None and config.kv == "f8":
        raise UnsupportedError("a KV cache in f8 needs a GPU", field="kv")
    _refuse_quantized_kv(config, description, kv_dtype)
    part_weights: DecoderWeights | ShardWeights = weights if ranks.is_alone else ShardWeights(weights, shard)
    decoder: TorchDecoder | CpuDecoder
    if library is None:
        decoder = TorchDecoder(description, part_weights, dtype, device, shard, communicator or ONE_RANK)
        kind = kernels.describe(device)
    else:
        decoder = CpuDecoder(description, part_weights, library, num_threads(config), config.activations, shard)
        kind = f"{library.isa} kernels"
    adapter_bytes = device_cache_bytes(config, description, dtype.itemsize, device)
    if isinstance(decoder, TorchDecoder):
        decoder.reserve_adapters(adapter_bytes, config.lora_max_adapter_size)
        threads = _sampling_threads(config, device)
    else:
        threads = decoder.threads
    logger.info("loaded %s on %s with %s in %.1f s", folder.name, device, kind, time.perf_counter() - started)
    # Attention over latent vectors or with sink tokens, and recurrences, cannot be recorded: they use PyTorch
    # operations that read sizes back from the device.
    can_record = not (description.latent or description.num_sink_tokens or description.state_size)
    if device.type == "cuda":
        can_record = can_record and kernels.can_record_attention(description.cached_dim)
    whole: Decoder = decoder if communicator is None else as_stage(decoder, description, communicator, dtype)
    divided = None if communicator is None else shard
    return LoadedModel(
        description,
        whole,
        device,
        dtype,
        kv_dtype,
        can_record,
        takes_host_inputs=library is not None,
        divided=divided,
        adapter_bytes=adapter_bytes,
        rounds_kv=weights.rounds_kv,
        threads=threads,
    )


def _use_kernel_settings(config: WorkerConfig, folder: ModelFolder, device: torch.device) -> None:
    """Configure the kernels. Raises ConfigError or UnsupportedError if a setting is invalid."""
    _check_activations(config, device)
    if device.type == "cuda":
        kernels.set_float8_inputs(config.activations == "f8")
        kernels.set_batch_invariant(config.batch_invariant, config.max_sequence_length or folder.max_sequence_length)
    _check_sinks(config)


def _check_sinks(config: WorkerConfig) -> None:
    """Raise ConfigError if the number of sink tokens is invalid."""
    if config.sink_token_length < 0:
        raise ConfigError(f"is {config.sink_token_length}; must be at least 0", field="sink_token_length")
    if config.sink_token_length and not config.max_attention_window:
        raise ConfigError("has no meaning without max_attention_window; leave it out", field="sink_token_length")


def _refuse_quantized_kv(config: WorkerConfig, description: DecoderDescription, kv_dtype: torch.dtype) -> None:
    """Raise UnsupportedError if the cache would be quantized, although the model needs exact keys."""
    kind = "latent attention" if description.latent is not None else "ALiBi" if description.alibi else ""
    if kind and kv_dtype in LARGEST:
        raise UnsupportedError(f"{kind} does not support a KV cache in {config.kv}", field="kv")


def _window_limits(config: WorkerConfig) -> tuple[int, ...]:
    """Return the limits of the layers' attention windows, as in `narrowed`. Raises ConfigError if one is invalid."""
    most = config.max_attention_window
    if not config.layer_attention_windows:
        return (most,) if most else ()
    limits = config.layer_attention_windows.split(",")
    for limit in limits:
        if not limit.strip().isdecimal() or not 1 <= int(limit) <= (most or int(limit)):
            raise ConfigError(
                f"has {limit.strip()!r}; must be numbers from 1{f' to {most}' if most else ''}",
                field="layer_attention_windows",
            )
    return tuple(map(int, limits))


def refuse_other_heads(folder: ModelFolder) -> None:
    """Raise UnsupportedError if the outputs of the model are of a kind that is not served."""
    for name in folder.config.get("architectures") or ():
        # Embeddings are computed without the head.
        if str(name).endswith(_OTHER_HEADS) and not (folder.is_encoder and str(name).endswith("ForMaskedLM")):
            raise UnsupportedError(f"the outputs of {name} are not served", field="model")


def _describe_native(config: WorkerConfig, folder: ModelFolder) -> DecoderDescription | None:
    """Return the description of a model that runs natively; None if the settings request the transformers
    implementation. Raises UnsupportedError if the model cannot run natively.
    """
    if config.implementation == "transformers":
        return None
    description = describe(folder.config, _window_limits(config), config.sink_token_length)
    if folder.weights_format == "gguf" and not family_of(description.architecture).reads_gguf:
        raise UnsupportedError(f"a GGUF file of {description.architecture!r} is not supported", field="model")
    if folder.num_labels is not None:
        # The scores of classes are used unchanged, even if the family changes the logits of tokens.
        return replace(description, ties_embeddings=False, logits_scale=1.0, logits_softcap=0.0)
    return description


def _load_fallback(
    config: WorkerConfig,
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    communicator: RankCommunicator | None,
    reason: UnsupportedError | None = None,
) -> LoadedModel:
    """Load a model with the transformers implementation; `reason` is why it does not run natively."""
    from gpu_worker.models.weights.quantized import refuse_quantized

    if communicator is not None:
        raise UnsupportedError(
            "a model that uses the transformers implementation cannot be sharded across ranks", field="model"
        )
    refuse_quantized(folder)
    try:
        return _load_from_transformers(config, folder, device, dtype)
    except UnsupportedError as error:
        if reason is None or all(folder.architecture not in family.types for family in FAMILIES):
            raise
        raise UnsupportedError(f"{reason.message}; {error.message}", field="model") from error


def _load_from_transformers(
    config: WorkerConfig, folder: ModelFolder, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    from gpu_worker.models.transformers_model import TransformersDecoder

    if folder.num_labels is not None:
        raise UnsupportedError(f"a classification head is not supported for {folder.architecture!r}", field="model")
    started = time.perf_counter()
    kv_dtype = _kv_dtype(config, device, dtype)
    limits = _window_limits(config), config.sink_token_length
    decoder = TransformersDecoder(folder, dtype, device, config.weights, *limits)
    kind, took = kernels.describe(device), time.perf_counter() - started
    logger.info("loaded %s (transformers implementation) on %s with %s in %.1f s", folder.name, device, kind, took)
    # Whether the transformers implementation reads anything back from the device depends on the model and on its
    # version.
    can_record = False if config.sink_token_length else None
    return LoadedModel(
        decoder.description,
        decoder,
        device,
        dtype,
        kv_dtype,
        can_record=can_record,
        takes_lora=False,
        threads=_sampling_threads(config, device),
    )


def _load_encoder(
    config: WorkerConfig,
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    communicator: RankCommunicator | None,
) -> LoadedModel:
    """Load an encoder. Raises the errors of `load_model`."""
    from gpu_worker.models.encoder import TransformersEncoder
    from gpu_worker.models.weights.quantized import refuse_quantized

    if communicator is not None:
        raise UnsupportedError("an encoder cannot be sharded across ranks", field="model")
    if config.implementation == "native":
        raise UnsupportedError(f"{folder.architecture!r} has only the transformers implementation", field="model")
    for name in _OF_THE_CACHE:
        if getattr(config, name) != getattr(WorkerConfig, name):
            raise ConfigError(f"has no meaning for {folder.architecture!r}, which has no KV cache", field=name)
    refuse_quantized(folder)
    started = time.perf_counter()
    encoder = TransformersEncoder(folder, dtype, device, config.weights)
    took = time.perf_counter() - started
    logger.info("loaded %s (encoder, transformers implementation) on %s in %.1f s", folder.name, device, took)
    return LoadedModel(
        encoder.description,
        encoder,
        device,
        dtype,
        kv_dtype=dtype,
        can_record=False,
        takes_lora=False,
        threads=_sampling_threads(config, device),
        is_encoder=True,
        probes=encoder.probes,
    )


def _choose_attention(
    config: WorkerConfig, part: DecoderDescription, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Choose this rank's attention kernels on a GPU. Raises ConfigError if the requested ones cannot be used."""
    if device.type != "cuda":
        if config.attention not in ("auto", "triton"):
            raise ConfigError(f"{config.attention} needs a GPU", field="attention")
        return
    case = kernels.AttentionCase(
        dtype, kv_dtype, part.num_heads, part.num_kv_heads, part.cached_dim, config.tokens_per_block, part.softcap
    )
    try:
        kernels.choose_attention("triton" if part.latent else config.attention, case, device)
    except ValueError as error:
        raise ConfigError(str(error), field="attention") from None


def _check_activations(config: WorkerConfig, device: torch.device) -> None:
    """Raise UnsupportedError or ConfigError if float8 activations are requested but cannot be used."""
    if config.activations != "f8":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLOAT8_ROWS_CAPABILITY:
        raise UnsupportedError("f8 needs a GPU of compute capability 9.0; use auto", field="activations")
    if config.batch_invariant:
        raise ConfigError("f8 is not batch-invariant; use auto", field="activations")


def _kv_dtype(config: WorkerConfig, device: torch.device, default: torch.dtype) -> torch.dtype:
    """Return the data type of keys and values for a model that does not run on the CPU kernels. Raises UnsupportedError
    if the device does not support the type in the settings.
    """
    dtype = _KV_DTYPES.get(config.kv, default)
    if device.type != "cuda":
        if dtype in LARGEST or not dtype.is_floating_point:
            needs = "a GPU" if config.kv == "f8" else "the CPU kernels or a GPU"
            raise UnsupportedError(f"a KV cache in {config.kv} needs {needs}", field="kv")
    elif dtype == torch.int16:
        raise UnsupportedError("a KV cache in int16 needs the CPU kernels; on a GPU use int8 or f8", field="kv")
    elif dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        raise UnsupportedError("this GPU has no float8; use int8", field="kv")
    return dtype


def compute_dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    """Return the data type of computation."""
    return torch.float32 if device.type == "cpu" or config.weights == "f32" else torch.bfloat16


def num_threads(config: WorkerConfig) -> int:
    """Return the number of compute threads on a CPU."""
    return config.num_threads or num_compute_threads()


def _cpu_library(config: WorkerConfig, description: DecoderDescription, ranks: Ranks) -> Library | None:
    """Return the CPU kernels, or None if PyTorch's operations are to be used instead."""
    if config.kernels == "torch":
        return None
    from gpu_worker.models.native import dims_of, what_is_missing

    reason = what_is_missing(description) or supports(dims_of(description))
    if ranks.tensor_size > 1:
        reason = "its layers are sharded across ranks"
    if reason is None:
        library = load_library(config.cpu_isa)
        if library is not None:
            return library
        reason = "no build of them runs on this machine; if it has no compiler, install g++ for 15 times the speed"
    if config.kernels == "native":
        raise ConfigError(f"the CPU kernels cannot run this model: {reason}", field="kernels")
    logger.warning("the CPU kernels cannot run this model; using PyTorch operations instead: %s", reason)
    return None


def _sampling_threads(config: WorkerConfig, device: torch.device) -> ThreadPool | None:
    """Return the threads of the CPU kernels for a model that does not itself run on these kernels; None on a GPU."""
    library = None if device.type != "cpu" or config.kernels == "torch" else load_library(config.cpu_isa)
    return None if library is None else ThreadPool(library, num_threads(config))


def use_device(config: WorkerConfig, ranks: Ranks = ALONE) -> torch.device:
    """Return the device on which a rank computes, after making it the current CUDA device of this thread.

    Call this before anything else that uses CUDA: streams, graphs, Triton's launches and pinned memory use the current
    device, and a context on another GPU would take hundreds of megabytes there. Raises ConfigError if the machine has
    no such device.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{ranks.local_rank}"
    device = _device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is not a device; use auto, cpu, cuda or cuda:N", field="device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name!r} is not a device; use auto, cpu, cuda or cuda:N", field="device")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"this machine has no device {name!r}", field="device")
    return device
