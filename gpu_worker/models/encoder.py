"""Runs encoders (BERT and the like) with their transformers implementation. They have no KV cache: a step computes
whole texts, and its results are pooled hidden states, or the scores of a classification head.

On a GPU, as with decoders (transformers_model.py), transformers' own code runs over the flattened tokens of a step as
if they were one text, each token with its own position; for attention, it calls this module, where each text attends
to itself. When a model is loaded, this is compared with each text alone. On a CPU, and with models whose attention does
not use transformers' interface, such as those with relative positions, one text is computed after another: its bits
then do not depend on others, and PyTorch's fast matrix multiplications can be used.

A classification head, which expects a batch of texts, runs after the layers, once for each text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.peft_folder import NO_LORA
from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.models.description import DecoderDescription, LayerParts
from gpu_worker.models.transformers_model import load_transformers, replace_linears
from gpu_worker.sampling.output_probes import OutputProbe
from midstream.errors import ConfigError, ExecutionError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.sentence_transformers import POOLED_STATES

_INTERFACE = "midstream_encoder"
# Prefixes of weights that embeddings do not need, and that checkpoints for embeddings may lack.
_POOLER = ("pooler.",)
# Lengths of the texts that are computed both ways when a model is loaded, in addition to its attention window.
_CHECKED_LENGTHS = (9, 4)

_lengths: ContextVar[Sequence[int]] = ContextVar("lengths")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query, key and value [1, H, M, D] -> [1, M, H, D]."""
    parts = []
    lengths = list(_lengths.get())
    for q, k, v in zip(*(torch.split(heads, lengths, dim=2) for heads in (query, key, value)), strict=True):
        mask, length = None, q.shape[2]
        if sliding_window is not None and length > sliding_window:
            places = torch.arange(length, device=q.device)
            mask = (places[:, None] - places).abs() < sliding_window
        parts.append(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, _attention)


class _GivenStates(nn.Module):
    """Takes the place of the layers under a classification head, and returns states that are already computed."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self._pooler = pooler
        self.states = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        pooled = None if self._pooler is None else self._pooler(self.states)
        return BaseModelOutputWithPooling(last_hidden_state=self.states, pooler_output=pooled)


class PooledStates(OutputProbe):
    """Pools the last layer's states over all tokens of a text, as the Pooling module of sentence-transformers does.

    Attributes:
        mode: cls, lasttoken, mean, max, mean_sqrt_len_tokens or weightedmean.
    """

    of_sequence: ClassVar[bool] = True

    def __init__(self, mode: str, width: int, last_layer: int) -> None:
        self.mode = mode
        self.width, self.layers = width, (last_layer,)  # type: ignore[misc]

    def compute(self, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
        """Return float32 [1, width]."""
        (rows,) = states.values()
        if self.mode == "cls":
            return rows[:1]
        if self.mode == "lasttoken":
            return rows[-1:]
        if self.mode == "max":
            return rows.amax(dim=0, keepdim=True)
        if self.mode == "weightedmean":
            weights = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)[:, None]
            return (rows * weights).sum(dim=0, keepdim=True) / weights.sum()
        divisor = len(rows) ** 0.5 if self.mode == "mean_sqrt_len_tokens" else len(rows)
        return rows.sum(dim=0, keepdim=True) / divisor


class TransformersEncoder:
    """An encoder that uses the transformers implementation.

    Attributes:
        description: Description of the model; it has no layers with keys and values.
        probes: Ways of pooling, by the names of the additional outputs with which requests ask for them.
    """

    def __init__(
        self,
        folder: ModelFolder,
        dtype: torch.dtype,
        device: torch.device,
        weights: str = "auto",
        *,
        packs: bool | None = None,
    ) -> None:
        """Load the model.

        Args:
            weights: How matrices are stored: auto (as `dtype`), f32, bf16 (rounded) or int8.
            packs: Whether texts are computed together, if the model can; None means on a GPU.

        Raises:
            ConfigError: Weights are missing or have another shape.
            UnsupportedError: The model cannot run this way; the message says why.
        """
        has_head = folder.num_labels is not None
        auto = transformers.AutoModelForSequenceClassification if has_head else transformers.AutoModel
        self._model: Any = load_transformers(folder, dtype, auto, "eager", may_lack=() if has_head else _POOLER)
        self._base: Any = self._model.base_model
        self._config, self._device, self._num_labels = self._model.config, device, folder.num_labels
        self._word_vocab_size, self._has_types = folder.word_vocab_size, folder.num_token_types > 1
        self._refuse_others()
        if not has_head and getattr(self._base, "pooler", None) is not None:
            self._base.pooler = None
        positions = getattr(self._base.embeddings, "position_embeddings", None)
        # Tokens of padding have this position, and others are counted from the next.
        self._padding = getattr(positions, "padding_idx", None)
        self._model.to(device)
        can_pack = bool(getattr(self._base, "_supports_attention_backend", False))
        self._packs = can_pack and (device.type == "cuda" if packs is None else packs)
        checked = [
            (torch.arange(length, dtype=torch.int32, device=device) * 7 + 5) % folder.word_vocab_size
            for length in self._checked_lengths(folder.max_sequence_length - 1)
        ]
        with torch.inference_mode():
            wanted = [self._whole(ids) for ids in checked]
        if device.type == "cuda" or weights in ("bf16", "int8"):
            replace_linears(self._model, weights)
        self._given = None
        if has_head:
            # The layers keep their pooler, which is part of the head, but do not run it.
            self._given = _GivenStates(getattr(self._base, "pooler", None))
            if self._given._pooler is not None:
                self._base.pooler = None
            setattr(self._model, self._model.base_model_prefix, self._given)
        if self._packs or getattr(self._base, "_supports_sdpa", False):
            self._config._attn_implementation = _INTERFACE if self._packs else "sdpa"
        with torch.inference_mode():
            self._compare(checked, wanted, weights)
        self.description = _describe(folder, self._config)
        last = self.description.num_layers
        self.probes = {
            name: PooledStates(mode, self.description.hidden_size, last) for mode, name in POOLED_STATES.items()
        }

    def place_adapter(self, adapter: Adapter) -> object:
        """Raise UnsupportedError; in fact, adapters are rejected when they are read."""
        raise UnsupportedError(NO_LORA, field="lora")

    def use_cache(self, kv: KvCache) -> None:
        """Do nothing: there are no keys and values to store."""

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Compute whole texts; return float32 [S, vocab_size], whose first columns are the scores of the classes of the
        text to which each sampled token belongs, and the others 0.
        """
        if inputs.virtual is not None:
            raise ExecutionError("an encoder has no virtual tokens")
        starts = inputs.query_starts.tolist()
        spans = [(start, end) for start, end in itertools.pairwise(starts) if end > start]
        texts = [inputs.token_ids[start:end] for start, end in spans]
        layers = frozenset[int]() if probe is None else probe.layers
        states = self._states(texts, layers)
        last = states[self.description.num_layers]
        if probe is not None:
            probe.states = {layer: states[layer] for layer in layers}
            probe.last = last
        # While other weights are loaded, transformers changes the process's default type.
        size = len(inputs.sampled), self.description.vocab_size
        scores = torch.zeros(size, dtype=torch.float32, device=self._device)
        if self._given is None:
            return scores
        span_of = {end - 1: slice(start, end) for start, end in spans}
        for row, place in enumerate(inputs.sampled.tolist()):
            if place in span_of:
                scores[row, : self._num_labels] = self._scores(last[span_of[place]])
        return scores

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 zeros [N, vocab_size]: single tokens have no scores."""
        return torch.zeros(len(last), self.description.vocab_size, dtype=torch.float32, device=self._device)

    def _states(self, texts: Sequence[Tensor], layers: frozenset[int]) -> dict[int, Tensor]:
        """Return the last layer's states, [M, hidden_size], and those of `layers`."""
        last = int(self._config.num_hidden_layers)
        packs = [texts] if self._packs else [[text] for text in texts]
        found: dict[int, list[Tensor]] = {layer: [] for layer in layers | {last}}
        for pack in packs:
            token = _lengths.set([len(text) for text in pack])
            try:
                options = self._inputs(pack)
                answer = self._base(output_hidden_states=bool(layers - {last}), return_dict=True, **options)
            finally:
                _lengths.reset(token)
            for layer, rows in found.items():
                state = answer.last_hidden_state if layer == last else answer.hidden_states[layer]
                rows.append(state[0])
        return {layer: torch.cat(rows) for layer, rows in found.items()}

    def _inputs(self, texts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tokens, types and positions of texts, one after another, as transformers' model takes them."""
        ids = [text.long() % self._word_vocab_size for text in texts]
        options = {"input_ids": torch.cat(ids)[None]}
        if self._has_types:
            options["token_type_ids"] = torch.cat([text.long() // self._word_vocab_size for text in texts])[None]
        if self._packs:
            options["position_ids"] = torch.cat([self._positions(text) for text in ids])[None]
        return options

    def _positions(self, ids: Tensor) -> Tensor:
        if self._padding is None:
            return torch.arange(len(ids), device=ids.device)
        is_text = (ids != self._padding).long()
        positions: Tensor = is_text.cumsum(0) * is_text + self._padding
        return positions

    def _scores(self, states: Tensor) -> Tensor:
        """Return the scores of the classes for the states [L, hidden_size] of a text."""
        assert self._given is not None
        self._given.states = states[None]
        # Heads look at the shape of these ids at most.
        ids = torch.zeros(1, len(states), dtype=torch.long, device=self._device)
        scores: Tensor = self._model(input_ids=ids, return_dict=True).logits[0].float()
        return scores

    def _whole(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a text's last states and scores as transformers computes them."""
        options = self._inputs([ids]) | {"attention_mask": torch.ones(1, len(ids), dtype=torch.long, device=ids.device)}
        options.pop("position_ids", None)
        states = self._base(return_dict=True, **options).last_hidden_state[0]
        return states, None if self._num_labels is None else self._model(return_dict=True, **options).logits[0].float()

    def _checked_lengths(self, longest: int) -> list[int]:
        window = getattr(self._config, "sliding_window", None) or 0
        return [min(length + window, longest) for length in _CHECKED_LENGTHS]

    def _compare(self, texts: Sequence[Tensor], wanted: Sequence[tuple[Tensor, Tensor | None]], weights: str) -> None:
        """Raise UnsupportedError unless texts that are computed together have the states and scores of each alone."""
        if weights in ("bf16", "int8"):
            return  # Rounded weights change the results.
        found = self._states(texts, frozenset())[int(self._config.num_hidden_layers)]
        rows = torch.split(found, [len(text) for text in texts])
        for states, (wanted_states, wanted_scores) in zip(rows, wanted, strict=True):
            pairs = [(states, wanted_states)]
            if wanted_scores is not None:
                pairs.append((self._scores(states), wanted_scores))
            for one, other in pairs:
                limit = torch.finfo(self._model.dtype).eps ** 0.5 * max(float(other.abs().max()), 1.0)
                if not float((one - other).abs().max()) <= limit:
                    raise UnsupportedError(
                        f"several texts cannot be computed together by transformers' {self._config.model_type!r}",
                        field="model",
                    )

    def _refuse_others(self) -> None:
        """Raise UnsupportedError if tokens attend only to those before, or if a text's angles depend on other texts."""
        if getattr(self._config, "is_decoder", False):
            raise UnsupportedError("is_decoder true of config.json is not supported", field="model")
        rope = getattr(self._config, "rope_parameters", None) or {}
        kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
        for kind in kinds:
            if kind.get("rope_type") in ("dynamic", "longrope"):
                raise UnsupportedError(f"rope_type {kind['rope_type']!r} is not supported for encoders", field="model")


def _describe(folder: ModelFolder, config: Any) -> DecoderDescription:
    if config.num_hidden_layers != folder.num_layers or config.hidden_size != folder.hidden_size:
        raise ConfigError("config.json has two values of one setting", field="model")
    num_layers = folder.num_layers
    part: LayerParts = "feed_forward"  # without keys and values
    return DecoderDescription(
        architecture=folder.architecture,
        vocab_size=folder.vocab_size,
        hidden_size=folder.hidden_size,
        intermediate_size=folder.hidden_size,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        norm_eps=0.0,
        rotary=(None,) * num_layers,
        windows=(None,) * num_layers,
        ties_embeddings=False,
        max_sequence_length=folder.max_sequence_length,
        scale=1.0,
        parts=(part,) * num_layers,
    )
