"""Measures the perplexity of a model on a text, as computed by a worker on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import Decoder, ForwardInputs
from gpu_worker.models.loader import load_model
from midstream.config import WorkerConfig
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer_file import read_tokenizer

WINDOW = 512
_BLOCK = 16


def open_decoder(folder: ModelFolder, settings: dict[str, Any]) -> Decoder:
    """Return a decoder on the CPU with the worker's settings and a cache for one window."""
    model = load_model(WorkerConfig(model=str(folder.path), device="cpu", **settings), folder)
    model.decoder.use_cache(KvCache(model.description, WINDOW // _BLOCK, _BLOCK, model.kv_dtype, model.device))
    return model.decoder


def logits_of(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """Return the logits [W, vocab] of all positions of a window [W]."""
    count = len(token_ids)
    positions = torch.arange(count, dtype=torch.int32)
    table = torch.arange(WINDOW // _BLOCK, dtype=torch.int32)[None]
    starts, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    return decoder.forward(ForwardInputs(token_ids, positions, positions, starts, lengths, table, positions))


def default_text() -> str:
    """Return a text that is part of every Python installation: the topics of `help()`, which differ by version."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(folder: ModelFolder, texts: list[str]) -> Iterator[Tensor]:
    """Yield all full windows of the texts' tokens."""
    tokenizer = Tokenizer.from_str(read_tokenizer(folder.path / "tokenizer.json"))
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text).ids, dtype=torch.int32)
        yield from (piece for piece in torch.split(ids, WINDOW) if len(piece) == WINDOW)


def perplexity(folder: ModelFolder, pieces: list[Tensor]) -> float:
    """Return the perplexity over windows of tokens; each window starts with an empty context. Raises ConfigError if the
    folder is damaged, or UnsupportedError if the model is not supported.
    """
    decoder, loss = open_decoder(folder, {}), 0.0
    for piece in pieces:
        logits = logits_of(decoder, piece)
        loss += torch.nn.functional.cross_entropy(logits[:-1], piece[1:].long(), reduction="sum").item()
    return float(torch.tensor(loss / (len(pieces) * (WINDOW - 1))).exp())


def first_windows(folder: ModelFolder, text: Path | None, count: int) -> list[Tensor]:
    """Return the first `count` windows of a file, or of `default_text`."""
    return list(windows(folder, [text.read_text(encoding="utf-8") if text else default_text()]))[:count]
