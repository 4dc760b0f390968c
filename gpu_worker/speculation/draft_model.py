"""A smaller model that proposes draft tokens for the served model.

It has its own KV pool, and tracks the blocks of each row and the tokens computed in them. Before it drafts, it computes
those tokens of the row that it has not seen: the whole prompt at first, and later the accepted tokens. Tokens that
differ from the row's current ones are recomputed, so it does not matter which sequence a row held before, or which
drafts were rejected. Drafts are sampled like the row's tokens, with the same random numbers, which raises the
acceptance rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import EMPTY, IntArray
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.loader import LoadedModel, load_beside
from gpu_worker.sampling.sampler import Sampler
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder


@dataclass(slots=True)
class _Row:
    """The draft model's state for a row: the tokens that it has computed, and the row's blocks."""

    blocks: list[int] = field(default_factory=list)
    tokens: IntArray = field(default_factory=lambda: EMPTY)


def load_draft_model(config: WorkerConfig, target: DecoderDescription) -> LoadedModel:
    """Load the configured draft model. Raises ConfigError if it cannot be loaded, or its vocabulary differs."""
    model = load_beside(config, open_model_folder(config.draft_model))
    if model.description.vocab_size != target.vocab_size:
        raise ConfigError(
            f"has {model.description.vocab_size} tokens; must have {target.vocab_size}, as the model has",
            field="draft_model",
        )
    return model


class DraftModel:
    """Proposes drafts for the rows of another model with the same vocabulary."""

    def __init__(self, model: LoadedModel, rows: Rows, kv: KvCache, max_num_tokens: int) -> None:
        """Use a model that is already loaded, and its pool.

        Args:
            max_num_tokens: Maximum number of tokens in one pass; longer prompts take several steps before drafts are
                proposed.
        """
        self._model = model
        self._rows = rows
        self._kv = kv
        self._max_num_tokens = max_num_tokens
        self._sampler = Sampler(rows, threads=model.threads)
        self._known: dict[int, _Row] = {}
        self._free = list(range(kv.num_blocks))
        model.decoder.use_cache(kv)

    def propose(self, rows: Mapping[int, int]) -> dict[int, IntArray]:
        """Return up to rows[row] draft tokens per row; none for rows that must catch up first, or lack blocks."""
        lengths = {row: int(self._rows.lengths[row]) for row in rows}
        ready = self._catch_up({row: limit for row, limit in rows.items() if self._make_room(row, limit)})
        drafts: dict[int, list[int]] = {row: [] for row in ready}
        chunks = ready
        while chunks:
            found = self._sampler.sample(self._forward(chunks), np.array(sorted(chunks), dtype=np.int32)).token_ids
            chunks = {}
            for row, token in zip(sorted(ready), found.tolist(), strict=True):
                drafts[row].append(token)
                if len(drafts[row]) < rows[row]:
                    self._rows.append_run(row, [token])
                    chunks[row] = lengths[row] + len(drafts[row]) - 1
            ready = chunks
        for row, length in lengths.items():
            self._rows.lengths[row] = length
        return {row: np.array(tokens, dtype=np.int32) for row, tokens in drafts.items()}

    def _make_room(self, row: int, limit: int) -> bool:
        """Allocate blocks for a row's tokens and drafts; return False if the row is too long, has virtual tokens, or
        too few blocks are free.
        """
        length = int(self._rows.lengths[row])
        tokens = self._rows.tokens[row, :length]
        if length + limit > self._model.description.max_sequence_length:
            return False
        if tokens.max() >= self._model.description.vocab_size:
            return False
        known = self._known.setdefault(row, _Row())
        num_missing = -(-(length + limit) // self._kv.tokens_per_block) - len(known.blocks)
        if num_missing > len(self._free):
            self._reclaim()
        if num_missing > len(self._free):
            return False
        known.blocks += [self._free.pop() for _ in range(num_missing)]
        return True

    def _reclaim(self) -> None:
        """Free the blocks of rows that no longer hold a sequence."""
        for row in [row for row in self._known if not self._rows.is_active[row]]:
            self._free += self._known.pop(row).blocks

    def _catch_up(self, rows: Mapping[int, int]) -> dict[int, int]:
        """Compute the tokens that the draft model lacks, as many as one pass allows.

        Returns:
            The rows that need only the final pass, with the first position of that pass.
        """
        ready: dict[int, int] = {}
        num_left = self._max_num_tokens
        for row in sorted(rows):
            length = int(self._rows.lengths[row])
            tokens, known = self._rows.tokens[row, :length], self._known[row].tokens
            num_same = min(len(known), length - 1)
            different = np.flatnonzero(known[:num_same] != tokens[:num_same])
            start = int(different[0]) if len(different) else num_same
            if length - start <= num_left:
                ready[row] = start
                num_left -= length - start
            elif num_left:
                self._known[row].tokens = tokens[:start].copy()
                self._rows.lengths[row] = start + num_left
                self._forward({row: start})
                self._rows.lengths[row] = length
                num_left = 0
        return ready

    def _forward(self, starts: Mapping[int, int]) -> torch.Tensor:
        """Compute rows from these positions to their ends; return the logits of the last tokens, in ascending order of
        rows.
        """
        rows = np.array(sorted(starts), dtype=np.int32)
        ends = self._rows.lengths[rows]
        firsts = np.array([starts[row] for row in rows.tolist()], dtype=np.int32)
        block_size = self._kv.tokens_per_block
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(firsts, ends, strict=True)])
        token_rows = np.repeat(np.arange(len(rows)), ends - firsts)
        tables = np.zeros((len(rows), -(-int(ends.max()) // block_size)), dtype=np.int32)
        for place, row in enumerate(rows.tolist()):
            blocks = self._known[row].blocks[: tables.shape[1]]
            tables[place, : len(blocks)] = blocks
            self._known[row].tokens = self._rows.tokens[row, : ends[place]].copy()
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(ends - firsts, out=query_starts[1:])
        slots = tables[token_rows, positions // block_size] * block_size + positions % block_size
        return self._model.decoder.forward(
            ForwardInputs(
                token_ids=torch.from_numpy(self._rows.tokens[rows[token_rows], positions]),
                positions=torch.from_numpy(positions),
                slot_mapping=torch.from_numpy(slots.astype(np.int32)),
                query_starts=torch.from_numpy(query_starts),
                context_lens=torch.from_numpy(ends.astype(np.int32)),
                block_tables=torch.from_numpy(tables),
                sampled=torch.from_numpy(query_starts[1:] - 1),
            )
        )
