"""Runs any causal language model of transformers with attention over the paged cache.

In a pass, transformers' own code runs over the flattened tokens of a step as if they were one sequence, each with its
own position. For attention, it calls this module through its attention interface: the layer's keys and values are
written to the pool, and each query attends to its own sequence through the block tables. Everything else in such a
model is computed per token, so tokens of other sequences in the batch have no effect.

A first pass over two tokens reveals the layers' settings: heads, scale, window and soft cap. The window is read from
the mask that transformers creates for the layer, because some models pass nothing else to their attention. This pass
rejects models that would give wrong results over a paged cache: those with attention outside that interface, with state
other than keys and values, or with masks and biases of their own. Further passes over different tokens, in which each
token attends only to itself, show whether anything else passes information between tokens, such as a convolution or a
recurrent state next to or before attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

import kernels
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.peft_folder import NO_LORA
from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.models.description import DecoderDescription, narrowed
from gpu_worker.models.layers.linear import LinearModule
from gpu_worker.models.weights.gguf_encoder import load_gguf_encoder
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder

_INTERFACE, _FIRST_LOOK = "midstream", "midstream_first_look"
# Arguments that some models pass to attention but that have no effect on it.
_NEEDLESS = {"position_ids", "cache_position", "cos", "sin"}
_ALIBI = {"bloom", "mpt"}
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Layer:
    """An attention layer: its index, and the settings that it passes in every call."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float


class _Pass(Protocol):
    """Computes attention in one pass: q [M, Hq, D], k and v [M, Hk, D] -> [M, Hq, Dv]."""

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor: ...


_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, keys -> which keys are visible
_current: ContextVar[_Pass] = ContextVar("pass")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [1, Hq, M, D], key and value [1, Hk, M, D] -> [1, M, Hq, Dv]."""
    options["attention_mask"] = attention_mask
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return _current.get()(module, q, k, v, options)[None], None


def _mask(q_length: int, kv_length: int, mask_function: _MaskFunction, **_: Any) -> Tensor:
    """Mask function for transformers in the first pass: return a tensor of the mask's shape, which identifies the mask
    in later calls.
    """
    look = _current.get()
    assert isinstance(look, _FirstLook)
    return look.note_mask(torch.zeros(1, 1, q_length, kv_length), mask_function)


# Later passes need no mask, so no mask function is registered for their implementation.
ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, _attention)
ALL_ATTENTION_FUNCTIONS.register(_FIRST_LOOK, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_FIRST_LOOK, _mask)


class _FirstLook:
    """A pass that records the layers' attention settings."""

    def __init__(
        self, config: transformers.PretrainedConfig, window_limits: Sequence[int], sink_token_length: int
    ) -> None:
        self.layers: dict[nn.Module, _Layer] = {}
        self._config = config
        self._window_limits, self._sink_token_length = window_limits, sink_token_length
        self._masks: list[tuple[Tensor, int | None]] = []

    def note_mask(self, mask: Tensor, mask_function: _MaskFunction) -> Tensor:
        """Record the window that a mask implements; return the mask unchanged. Raises UnsupportedError if the mask does
        not implement causal attention within a window.
        """
        last = int(self._config.max_position_embeddings) - 1
        num_seen: dict[int, int] = {}
        for place in {last, last - 1, last // 2}:
            keys = torch.arange(last + 1)
            is_seen = mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(place), keys).expand(last + 1)
            num_seen[place] = count = int(is_seen.sum())
            if not is_seen[place + 1 - count : place + 1].all():
                raise UnsupportedError(f"the attention of {self._config.model_type!r} is not causal", field="model")
        window = num_seen[last] if num_seen[last] <= last else None
        if any(count != min(place + 1, window or place + 1) for place, count in num_seen.items()):
            raise UnsupportedError(
                f"the attention of {self._config.model_type!r} is not attention within a window", field="model"
            )
        self._masks.append((mask, window))
        return mask

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        window = self._window(len(self.layers), options)
        options = {name: value for name, value in options.items() if not self._is_known_mask(value)}
        unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in _NEEDLESS]
        if unknown or module in self.layers or not getattr(module, "is_causal", True):
            reason = f"brings {', '.join(unknown)}" if unknown else "is not causal, or is used twice"
            raise UnsupportedError(f"the attention of {self._config.model_type!r} {reason}", field="model")
        index, head_dim = len(self.layers), q.shape[-1]
        scale = options.get("scaling")
        self.layers[module] = _Layer(
            index=index,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=head_dim,
            value_dim=v.shape[-1],
            scale=head_dim**-0.5 if scale is None else float(scale),
            window=narrowed([window], self._limits_of(index), self._sink_token_length)[0],
            softcap=float(options.get("softcap") or 0.0),
        )
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])

    def _limits_of(self, index: int) -> Sequence[int]:
        limits = self._window_limits
        return limits and [limits[index % len(limits)]]

    def _is_known_mask(self, value: object) -> bool:
        return any(value is mask for mask, _ in self._masks)

    def _window(self, index: int, options: Mapping[str, Any]) -> int | None:
        """Return the window given by the layer's mask or, if it has none, by its arguments or the configuration."""
        for mask, window in self._masks:
            if options["attention_mask"] is mask:
                return window
        if options.get("sliding_window"):
            return int(options["sliding_window"])
        kinds = getattr(self._config, "layer_types", None)
        if not kinds or kinds[index] != "sliding_attention":
            return None
        return int(self._config.sliding_window)


def _alone(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return a value for each token that depends only on its own query, key and value."""
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    return v * (1 + torch.tanh((q * k).mean(-1, keepdim=True)))


class _PagedPass:
    """A pass over the KV pool."""

    def __init__(
        self, layers: Mapping[nn.Module, _Layer], kv: KvCache, inputs: ForwardInputs, num_sink_tokens: int
    ) -> None:
        self._layers, self._kv, self._inputs = layers, kv, inputs
        self._num_sink_tokens = num_sink_tokens

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        layer, kv, inputs = self._layers[module], self._kv, self._inputs
        if layer.value_dim < layer.head_dim:
            v = nn.functional.pad(v, (0, layer.head_dim - layer.value_dim))
        scales = kv.scales(layer.index)
        kernels.store_kv(k, v, kv.keys[layer.index], kv.values[layer.index], inputs.slot_mapping, scales=scales)
        out = kernels.paged_attention(
            q.contiguous(),
            kv.keys[layer.index],
            kv.values[layer.index],
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
            layer.scale,
            layer.window,
            layer.softcap,
            scales=scales,
            num_sink_tokens=self._num_sink_tokens,
            max_queries=inputs.max_queries,
        )
        return out[..., : layer.value_dim]


class TransformersDecoder:
    """A causal language model that uses the transformers implementation.

    Attributes:
        description: Description of the model; fields that only native models use are empty.
    """

    def __init__(
        self,
        folder: ModelFolder,
        dtype: torch.dtype,
        device: torch.device,
        weights: str = "auto",
        window_limits: Sequence[int] = (),
        sink_token_length: int = 0,
    ) -> None:
        """Load the model.

        Args:
            weights: How matrices are stored: auto (as `dtype`), f32, bf16 (rounded) or int8.
            window_limits: Upper limits of the tokens that layers attend to, as in `narrowed`.
            sink_token_length: Number of first tokens in each layer's window, which layers always attend to.

        Raises:
            ConfigError: Weights are missing or have another shape.
            UnsupportedError: The model cannot run this way; the message says why.
        """
        self._model = load_transformers(folder, dtype, transformers.AutoModelForCausalLM, _INTERFACE)
        replace_linears(self._model, weights)
        self._model.to(device)
        self._device = device
        self._takes_places = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._layers = self._first_look(window_limits, sink_token_length)
        self._check_tokens_and_positions()
        self._kv: KvCache | None = None
        described = _describe(self._model.config.get_text_config(), folder, list(self._layers.values()))
        self.description = replace(described, num_sink_tokens=sink_token_length)

    def place_adapter(self, adapter: Adapter) -> object:
        """Raise UnsupportedError; in fact, adapters are rejected when they are read."""
        raise UnsupportedError(NO_LORA, field="lora")

    def use_cache(self, kv: KvCache) -> None:
        self._kv = kv

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write the keys and values of all tokens; return float32 logits [S, vocab_size] of the sampled tokens."""
        assert self._kv is not None
        options: dict[str, Any] = {}
        if inputs.virtual is None:
            options["input_ids"] = inputs.token_ids.long()[None]
        else:
            embedded = self._model.get_input_embeddings()(inputs.token_ids.long())
            embedded[inputs.virtual.places.to(self._device)] = inputs.virtual.values.to(embedded)
            options["inputs_embeds"] = embedded[None]
            if (layer_inputs := getattr(self._model.base_model, "get_per_layer_inputs", None)) is not None:
                # Gemma 3n's second embedding table is indexed by token ids.
                options["per_layer_inputs"] = layer_inputs(inputs.token_ids.long()[None])
        sampled = inputs.sampled.long()
        is_whole = probe is not None or not self._takes_places
        if not is_whole:
            options["logits_to_keep"] = sampled
        if probe is not None and probe.layers:
            options["output_hidden_states"] = True
        attention = _PagedPass(self._layers, self._kv, inputs, self.description.num_sink_tokens)
        answer = self._run(attention, inputs.positions.long()[None], **options)
        logits: Tensor = answer.logits[0]
        if probe is not None:
            for layer in probe.layers:
                states = answer.hidden_states[layer]
                if states.dim() == 4:  # Gemma 3n predicts several states and continues with one of them
                    states = states[self._model.config.get_text_config().altup_active_idx]
                probe.keep(layer, states[0])
            probe.last = logits
        return (logits[sampled] if is_whole else logits).float()

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits; in this class, `last` already contains the logits."""
        return last.float()

    @torch.inference_mode()
    def _first_look(self, window_limits: Sequence[int], sink_token_length: int) -> dict[nn.Module, _Layer]:
        config = self._model.config.get_text_config()
        look = _FirstLook(config, window_limits, sink_token_length)
        config._attn_implementation = _FIRST_LOOK
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self._device)
        try:
            self._run(look, torch.arange(2, device=self._device)[None], input_ids=tokens)
        except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
            reason = _own_attention(self._model.config) or f"transformers' {config.model_type!r} does not run: {error}"
            raise UnsupportedError(reason, field="model") from error
        finally:
            config._attn_implementation = _INTERFACE
        layers = list(look.layers.values())
        if len(layers) != config.num_hidden_layers:
            reason = _own_attention(self._model.config) or (
                f"only {len(layers)} of {config.num_hidden_layers} layers of {config.model_type!r} use transformers' "
                "attention interface"
            )
            raise UnsupportedError(reason, field="model")
        if (
            len({(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1
            or layers[0].value_dim > layers[0].head_dim
        ):
            raise UnsupportedError(
                f"the layers of {config.model_type!r} have heads of different sizes or different numbers of heads",
                field="model",
            )
        return look.layers

    @torch.inference_mode()
    def _check_tokens_and_positions(self) -> None:
        """Raise UnsupportedError if tokens interact outside attention, or if the model's positions differ from ours."""
        config = self._model.config.get_text_config()
        from_zero = torch.arange(2, device=self._device)[None]

        def logits(*tokens: int, positions: Tensor | None = from_zero) -> Tensor:
            ids = torch.tensor([tokens], device=self._device) % config.vocab_size
            found: Tensor = self._run(_alone, positions, input_ids=ids).logits[0].float()
            return found

        base, other_first, other_second = logits(5, 9), logits(7, 9), logits(5, 11)
        # The experts' matrix multiplications may round differently when other rows change.
        limit = torch.finfo(self._model.dtype).eps ** 0.5 * float(base.abs().max())
        for place, changed in ((1, other_first), (0, other_second)):
            if not float((changed[place] - base[place]).abs().max()) <= limit:
                raise UnsupportedError(
                    f"{config.model_type!r} passes something from token to token outside of its attention, such as a "
                    "convolution or a recurrent state, so it cannot run over the paged cache",
                    field="model",
                )
        if not float((logits(5, 9, positions=None) - base).abs().max()) <= limit:
            raise UnsupportedError(f"{config.model_type!r} does not count positions from 0", field="model")

    def _run(self, attention: _Pass, positions: Tensor | None, **options: Any) -> Any:
        token = _current.set(attention)
        try:
            return self._model(position_ids=positions, use_cache=False, return_dict=True, **options)
        finally:
            _current.reset(token)


def load_transformers(
    folder: ModelFolder, dtype: torch.dtype, auto: Any, attention: str, may_lack: tuple[str, ...] = ()
) -> Any:
    """Load a model with an auto class of transformers.

    Args:
        attention: Name of its implementation of attention.
        may_lack: Prefixes of the names of weights that may be missing.

    Raises:
        ConfigError: Weights are missing or have another shape.
        UnsupportedError: transformers cannot load it.
    """
    if folder.weights_format != "safetensors":
        return load_gguf_encoder(folder, dtype, auto, attention, may_lack)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = auto.from_pretrained(
            folder.path,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        reason = _own_attention(_config_of(folder)) or f"transformers cannot load {folder.architecture!r}: {lines[0]}"
        raise UnsupportedError(reason, field="model") from error
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[kind] if not str(name).startswith(may_lack or ("\0",)))
        if names:
            raise ConfigError(f"the weights have {kind.replace('_', ' ')}: {', '.join(names[:3])}", field="model")
    return model.eval()


def _config_of(folder: ModelFolder) -> Any:
    """Return transformers' configuration object for config.json; None if the architecture is unknown."""
    try:
        return transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 (as above)
        return None


def _own_attention(config: Any) -> str:
    """Return why a model cannot run if its class does not use the attention interface; empty if it does."""
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if kind is None or getattr(kind, "_supports_attention_backend", False):
        return ""
    alibi = " and adds ALiBi biases" if getattr(config, "alibi", config.model_type in _ALIBI) else ""
    return (
        f"transformers' {kind.__name__} does not compute its layers through transformers' attention interface{alibi}, "
        "so it cannot run over the paged cache"
    )


def replace_linears(model: nn.Module, weights: str) -> None:
    """Replace linear layers by ones like the native layers: batch-invariant on a CPU, optionally with int8 weights."""
    for module in list(model.modules()):
        child: Any
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, LinearModule(child.weight, child.bias, weights))
            elif type(child) is Conv1D:  # GPT-2's linear layer, whose weight is stored transposed
                setattr(module, name, LinearModule(child.weight.detach().t().contiguous(), child.bias, weights))


def _describe(config: Any, folder: ModelFolder, layers: list[_Layer]) -> DecoderDescription:
    sizes = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return DecoderDescription(
        architecture=folder.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=max(sizes) if isinstance(sizes, list) else sizes,  # a list has one size per layer
        num_layers=len(layers),
        num_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        norm_eps=0.0,
        rotary=(None,) * len(layers),
        windows=tuple(layer.window for layer in layers),
        ties_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        scale=layers[0].scale,
        max_sequence_length=_max_sequence_length(config),
    )


def _max_sequence_length(config: Any) -> int:
    """Return the maximum length at which the rotary embedding of a sequence is independent of the rest of the batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have separate settings for each type of layer.
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    # Beyond these lengths, transformers uses different angles for the whole batch.
    lengths = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(int(length) for length in (config.max_position_embeddings, *lengths) if length)
