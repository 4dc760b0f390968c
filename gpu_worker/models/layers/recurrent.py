"""Layers with a recurrent state of constant size: gated delta nets, Mamba 1 and 2, short convolutions.

Each KV block has space for one state per such layer. A sequence's current state is in the block of its last token, so a
full block holds the state after its last token, and the first token of a block starts from the state of the previous
block. A state is found, copied and dropped together with its block.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from gpu_worker.models.description import ChannelMamba, DeltaNet, Mamba, ShortConv
from gpu_worker.models.layers.linear import AddLora, Linear, with_lora
from kernels import recurrence


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of tokens from different sequences; all runs have equal length, and each is within one block.

    Attributes:
        tokens: int64 [n, T], positions in the step's flattened tokens.
        sources: int64 [n], the block with the initial state; any value if `is_first`.
        targets: int64 [n], the block that receives the final state.
        is_first: bool [n], whether the sequence has no earlier tokens.
    """

    tokens: Tensor
    sources: Tensor
    targets: Tensor
    is_first: Tensor


def pieces_of(
    query_starts: Tensor, context_lens: Tensor, block_tables: Tensor, tokens_per_block: int, device: torch.device
) -> list[Pieces]:
    """Split a step's tokens at block boundaries, ordered so that each state is written before it is read.

    A sequence may start at the end of a block that another sequence computes in the same step.
    """
    starts, lengths, tables = query_starts.tolist(), context_lens.tolist(), block_tables.tolist()
    # (index of the block in its table, first token, number of tokens, source, target, whether the piece is the first)
    pieces: list[tuple[int, int, int, int, int, bool]] = []
    for i, length in enumerate(lengths):
        token = starts[i]
        position = length - (starts[i + 1] - token)
        while length and position < length:
            number = position // tokens_per_block
            size = min(length, (number + 1) * tokens_per_block) - position
            source = tables[i][max(position - 1, 0) // tokens_per_block]
            pieces.append((number, token, size, source, tables[i][number], position == 0))
            token, position = token + size, position + size
    turns: dict[int, int] = {}
    groups: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = defaultdict(list)
    # Sorting by block index puts each piece after those that it continues, even if they are in other tables.
    for _, token, size, source, target, is_first in sorted(pieces):
        turn = 0 if is_first else turns.get(source, -1) + 1
        turns[target] = turn
        groups[turn, size].append((token, source, target, is_first))
    made = []
    for (_, size), members in sorted(groups.items()):
        tokens, sources, targets, are_first = zip(*members, strict=True)
        made.append(
            Pieces(
                torch.tensor(tokens, device=device)[:, None] + torch.arange(size, device=device),
                torch.tensor(sources, device=device),
                torch.tensor(targets, device=device),
                torch.tensor(are_first, device=device),
            )
        )
    return made


def _read(states: Tensor, pieces: Pieces, kernel: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return the convolution's last inputs [n, kernel - 1, channels], and the remaining state [n, …]."""
    found = states[pieces.sources].masked_fill(pieces.is_first[:, None], 0.0)
    inputs, rest = torch.split(found, [(kernel - 1) * channels, found.shape[1] - (kernel - 1) * channels], dim=1)
    return inputs.reshape(-1, kernel - 1, channels), rest


def _write(states: Tensor, pieces: Pieces, inputs: Tensor, rest: Tensor) -> None:
    states[pieces.targets] = torch.cat((inputs.flatten(1), rest.flatten(1)), dim=1)


@dataclass(frozen=True, slots=True)
class DeltaNetLayer:
    """A gated delta net.

    Attributes:
        joined: Projection to queries, keys, values and gates.
        rates: Projection to corrections and decays, before activation.
        conv: [channels, kernel].
        step_bias, decay_rates: [value_heads]; decay_rates are negative.
        norm: [value_dim].
    """

    description: DeltaNet
    joined: Linear
    rates: Linear
    conv: Tensor
    step_bias: Tensor
    decay_rates: Tensor
    norm: Tensor
    norm_eps: float
    output: Linear

    def __call__(self, x: Tensor, states: Tensor, pieces: list[Pieces], add_lora: AddLora | None) -> Tensor:
        """Compute x [M, hidden_size], given the layer's states [num_blocks, state_size] -> [M, hidden_size]."""
        d, num_tokens = self.description, len(x)
        each = d.value_heads // d.key_heads
        mixed, gate, beta, step = self._inputs(x, add_lora)
        beta = recurrence.sigmoid(beta)
        decay = torch.exp(recurrence.wide(self.decay_rates * recurrence.softplus(step + self.step_bias))).float()
        read = torch.zeros(num_tokens, d.value_heads, d.value_dim, dtype=torch.float32, device=x.device)
        sizes = [d.key_heads * d.key_dim, d.key_heads * d.key_dim, d.value_heads * d.value_dim]
        for piece in pieces:
            shape = piece.tokens.shape
            before, memory = _read(states, piece, d.kernel, d.channels)
            made, after = recurrence.causal_conv(mixed[piece.tokens], before, self.conv, None)
            queries, keys, values = torch.split(recurrence.silu(made), sizes, dim=-1)
            queries, keys = (
                recurrence.unit_rows(part.reshape(*shape, d.key_heads, d.key_dim)).repeat_interleave(each, dim=2)
                for part in (queries, keys)
            )
            read[piece.tokens], memory = recurrence.gated_delta_rule(
                queries * d.key_dim**-0.5,
                keys,
                values.reshape(*shape, d.value_heads, d.value_dim),
                decay[piece.tokens],
                beta[piece.tokens],
                memory.reshape(-1, d.value_heads, d.key_dim, d.value_dim),
            )
            _write(states, piece, after, memory)
        normed = kernels.rms_norm(read, self.norm, self.norm_eps)
        gated = normed * recurrence.silu(gate.reshape(num_tokens, d.value_heads, d.value_dim))
        return with_lora(self.output, gated.flatten(1).to(x.dtype), "mixer_out", add_lora)

    def _inputs(self, x: Tensor, add_lora: AddLora | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, as float32 [M, …], the convolution input, the output gates, and beta and decay before activation."""
        d, num_tokens = self.description, len(x)
        joined, rates = self.joined(x), self.rates(x)
        if add_lora is not None and d.is_in_turn:
            add_lora("qkvz", x, joined)
            add_lora("ba", x, rates)
        elif add_lora is not None:
            add_lora("qkv", x, joined[:, : d.channels])
            add_lora("z", x, joined[:, d.channels :])
            add_lora("b", x, rates[:, : d.value_heads])
            add_lora("a", x, rates[:, d.value_heads :])
        joined, rates = joined.float(), rates.float()
        if not d.is_in_turn:
            beta, step = rates.chunk(2, dim=-1)
            return joined[:, : d.channels], joined[:, d.channels :], beta, step
        values = d.value_heads // d.key_heads * d.value_dim
        q, k, v, gate = torch.split(
            joined.view(num_tokens, d.key_heads, -1), [d.key_dim, d.key_dim, values, values], dim=-1
        )
        beta, step = (
            part.reshape(num_tokens, d.value_heads) for part in rates.view(num_tokens, d.key_heads, -1).chunk(2, dim=-1)
        )
        return torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1), gate, beta, step


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """Mamba 2.

    Attributes:
        joined: Projection to gates, then the inputs of the convolution, then time steps.
        conv: [channels, kernel].
        conv_bias: [channels].
        step_bias, decay_rates, skip: [num_heads]; decay_rates are negative.
        norm: [num_heads * head_dim]; None if there is no norm.
    """

    description: Mamba
    joined: Linear
    conv: Tensor
    conv_bias: Tensor | None
    step_bias: Tensor
    decay_rates: Tensor
    skip: Tensor
    norm: Tensor | None
    norm_eps: float
    output: Linear

    def __call__(self, x: Tensor, states: Tensor, pieces: list[Pieces], add_lora: AddLora | None) -> Tensor:
        """Compute x [M, hidden_size], given the layer's states [num_blocks, state_size] -> [M, hidden_size]."""
        d, num_tokens = self.description, len(x)
        size, of_groups = d.num_heads * d.head_dim, d.num_groups * d.state_dim
        joined = with_lora(self.joined, x, "in", add_lora).float()
        if any(scale != 1.0 for scale in d.scales):
            parts = torch.split(joined, [size, size, of_groups, of_groups, d.num_heads], dim=-1)
            joined = torch.cat([part * scale for part, scale in zip(parts, d.scales, strict=True)], dim=-1)
        gate, mixed, step = torch.split(joined, [size, d.channels, d.num_heads], dim=-1)
        step = recurrence.softplus(step + self.step_bias).clamp(*d.step_limits)
        decay = torch.exp(recurrence.wide(self.decay_rates * step)).float()
        read = torch.zeros(num_tokens, d.num_heads, d.head_dim, dtype=torch.float32, device=x.device)
        for piece in pieces:
            shape = piece.tokens.shape
            before, memory = _read(states, piece, d.kernel, d.channels)
            made, after = recurrence.causal_conv(mixed[piece.tokens], before, self.conv, self.conv_bias)
            values, b, c = torch.split(recurrence.silu(made), [size, of_groups, of_groups], dim=-1)
            values = values.reshape(*shape, d.num_heads, d.head_dim)
            out, memory = recurrence.selective_scan(
                values,
                step[piece.tokens],
                decay[piece.tokens],
                b.reshape(*shape, d.num_groups, d.state_dim),
                c.reshape(*shape, d.num_groups, d.state_dim),
                memory.reshape(-1, d.num_heads, d.head_dim, d.state_dim),
            )
            read[piece.tokens] = out + values * self.skip[:, None]
            _write(states, piece, after, memory)
        gated = read.flatten(1) * recurrence.silu(gate)
        if self.norm is not None:
            grouped = gated.view(num_tokens, d.num_groups, -1)
            gated = kernels.rms_norm(grouped, torch.ones_like(grouped[0, 0]), self.norm_eps).flatten(1) * self.norm
        out = self.output(gated.to(x.dtype))
        return out if d.output_scale == 1.0 else out * d.output_scale


@dataclass(frozen=True, slots=True)
class ChannelMambaLayer:
    """Mamba 1.

    Attributes:
        joined: Projection to the inputs of the convolution, then gates.
        selection: Projection of the convolution's outputs to low-rank time steps, then the factors of what is stored
            and of what is read.
        step: Projection of low-rank time steps to those of the channels.
        conv: [size, kernel].
        conv_bias, skip: [size].
        decay_rates: [size, state_dim]; they are negative.
    """

    description: ChannelMamba
    joined: Linear
    selection: Linear
    step: Linear
    conv: Tensor
    conv_bias: Tensor | None
    decay_rates: Tensor
    skip: Tensor
    output: Linear

    def __call__(self, x: Tensor, states: Tensor, pieces: list[Pieces], add_lora: AddLora | None) -> Tensor:
        """Compute x [M, hidden_size], given the layer's states [num_blocks, state_size] -> [M, hidden_size]."""
        d = self.description
        mixed, gate = with_lora(self.joined, x, "in", add_lora).float().chunk(2, dim=-1)
        read = torch.zeros_like(mixed)
        for piece in pieces:
            shape = piece.tokens.shape
            before, memory = _read(states, piece, d.kernel, d.channels)
            made, after = recurrence.causal_conv(mixed[piece.tokens], before, self.conv, self.conv_bias)
            values = recurrence.silu(made)
            selected = self.selection(values.flatten(0, 1).to(x.dtype))
            ranked, b, c = torch.split(selected, [d.step_rank, d.state_dim, d.state_dim], dim=-1)
            step = recurrence.softplus(self.step(ranked.contiguous()).float())
            out, memory = recurrence.channel_scan(
                values,
                step.view(*shape, d.size),
                self.decay_rates,
                b.float().reshape(*shape, d.state_dim),
                c.float().reshape(*shape, d.state_dim),
                memory.reshape(-1, d.size, d.state_dim),
            )
            read[piece.tokens] = out + values * self.skip
            _write(states, piece, after, memory)
        return self.output((read * recurrence.silu(gate)).to(x.dtype))


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """A gated short convolution.

    Attributes:
        joined: Projection to the gates of the convolution's input, the gates of its output, and the input itself, in
            this order.
        conv: [size, kernel].
        conv_bias: [size].
    """

    description: ShortConv
    joined: Linear
    conv: Tensor
    conv_bias: Tensor | None
    output: Linear

    def __call__(self, x: Tensor, states: Tensor, pieces: list[Pieces], add_lora: AddLora | None) -> Tensor:
        """Compute x [M, hidden_size], given the layer's states [num_blocks, state_size] -> [M, hidden_size]."""
        d = self.description
        before_gate, after_gate, inputs = with_lora(self.joined, x, "in", add_lora).float().chunk(3, dim=-1)
        mixed, made = before_gate * inputs, torch.zeros_like(inputs)
        for piece in pieces:
            before, rest = _read(states, piece, d.kernel, d.channels)
            made[piece.tokens], after = recurrence.causal_conv(mixed[piece.tokens], before, self.conv, self.conv_bias)
            _write(states, piece, after, rest)
        return with_lora(self.output, (after_gate * made).to(x.dtype), "mixer_out", add_lora)
