"""Encodes and decodes the commands that rank 0 sends to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_worker.lora.adapter import LoraPair
from gpu_worker.lora.inputs import AdapterTokens, VirtualTokens
from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.sampling.post_processors import Call
from protos import ranks_pb2

_NUMBERS = ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "sampled")


def encode_forward(
    inputs: ForwardInputs,
    probe: Probe | None,
    adapters: Sequence[int],
    dropped: Sequence[int],
    *,
    is_open: bool = False,
) -> ranks_pb2.RankCommand:
    """Encode one forward pass.

    Args:
        inputs: Inputs of the pass, as CPU tensors.
        adapters: Numbers of the adapters that `inputs` uses, in the same order.
        dropped: Numbers of adapters that are no longer needed.
        is_open: Whether the first stage completes the pass only with a later command.
    """
    forward = ranks_pb2.ForwardPass(
        numbers=b"".join(getattr(inputs, name).numpy().tobytes() for name in _NUMBERS),
        num_tokens=len(inputs.token_ids),
        num_sequences=len(inputs.context_lens),
        num_table_blocks=inputs.block_tables.shape[1],
        adapters=adapters,
        is_probed=probe is not None,
        probed_layers=sorted(probe.layers) if probe is not None else (),
        dropped_adapters=dropped,
        is_open=is_open,
    )
    if inputs.adapters is not None:
        forward.adapter_places = inputs.adapters.indices.numpy().astype(np.int32).tobytes()
    if inputs.virtual is not None:
        forward.virtual_places = inputs.virtual.places.numpy().astype(np.int64).tobytes()
        forward.virtual_values = inputs.virtual.values.numpy().astype(np.float32).tobytes()
    return ranks_pb2.RankCommand(forward=forward)


def decode_forward(
    forward: ranks_pb2.ForwardPass, adapters: Mapping[int, object]
) -> tuple[ForwardInputs, Probe | None]:
    """Decode a forward pass; `adapters` contains this rank's parts of the adapters, by number."""
    m, b, k = forward.num_tokens, forward.num_sequences, forward.num_table_blocks
    numbers = _tensor(forward.numbers, torch.int32)
    sizes = [m, m, m, b + 1, b, b * k]
    parts = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
    token_ids, positions, slots, starts, lens, tables, sampled = parts
    used, virtual = None, None
    if forward.adapters:
        used = AdapterTokens(
            tuple(map(str, forward.adapters)),
            tuple(adapters[number] for number in forward.adapters),
            _tensor(forward.adapter_places, torch.int32),
        )
    if forward.virtual_places:
        places = _tensor(forward.virtual_places, torch.int64)
        virtual = VirtualTokens(places, _tensor(forward.virtual_values, torch.float32).view(len(places), -1))
    inputs = ForwardInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_starts=starts,
        context_lens=lens,
        block_tables=tables.view(b, k),
        sampled=sampled,
        adapters=used,
        virtual=virtual,
    )
    return inputs, Probe(frozenset(forward.probed_layers)) if forward.is_probed else None


def encode_adapter_layer(number: int, pairs: Mapping[str, LoraPair], *, is_last: bool) -> ranks_pb2.RankCommand:
    return ranks_pb2.RankCommand(
        adapter_layer=ranks_pb2.AdapterLayer(
            adapter=number,
            is_last=is_last,
            pairs=[
                ranks_pb2.AdapterPair(
                    module=module,
                    rank=len(pair.a),
                    a=pair.a.float().numpy().tobytes(),
                    b=pair.b.float().numpy().tobytes(),
                    scale=pair.scale,
                )
                for module, pair in pairs.items()
            ],
        )
    )


def decode_adapter_layer(layer: ranks_pb2.AdapterLayer) -> dict[str, LoraPair]:
    return {
        pair.module: LoraPair(
            _tensor(pair.a, torch.float32).view(pair.rank, -1),
            _tensor(pair.b, torch.float32).view(-1, pair.rank),
            pair.scale,
        )
        for pair in layer.pairs
    }


def encode_post_process(call: Call) -> ranks_pb2.RankCommand:
    """Encode a call of a post-processor without its logits."""
    return ranks_pb2.RankCommand(
        post_process=ranks_pb2.PostProcess(
            name=call.name,
            tokens=b"".join(known.astype(np.int32).tobytes() for known in call.tokens),
            lengths=[len(known) for known in call.tokens],
            client_ids=call.client_ids,
            request_ids=call.request_ids,
        )
    )


def decode_post_process(message: ranks_pb2.PostProcess) -> Call:
    tokens = np.frombuffer(message.tokens, dtype=np.int32)
    parts = np.split(tokens, np.cumsum(message.lengths)[:-1])
    return Call(message.name, parts, list(message.client_ids), list(message.request_ids))


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
