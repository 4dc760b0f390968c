"""Measure the quality of each number format: perplexity of a text, and changes of the logits relative to the exact
path.

`python -m benchmarks.perplexity` reads a text in windows, each with an empty context, and compares every configuration
with the first one, which is exact: dequantized weights, float32 activations and cache. Without `--text` it uses the
topics of Python's `help()` and prints their digest, since they differ between versions.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gpu_worker.models.perplexity import WINDOW, default_text, logits_of, open_decoder, windows
from midstream.model.folder import open_model_folder

MAX_WINDOWS = 40  # 20,480 tokens
CHOICES: dict[str, dict[str, str]] = {
    "exact: f32 activations and cache": {"activations": "f32", "kv": "f32"},
    "int16 activations": {"activations": "int16", "kv": "f32"},
    "int8 activations": {"activations": "int8", "kv": "f32"},
    "bf16 cache": {"activations": "f32", "kv": "bf16"},
    "int16 cache": {"activations": "f32", "kv": "int16"},
    "int8 cache": {"activations": "f32", "kv": "int8"},
    "default: int16 activations and cache": {},
    "bf16 weights": {"weights": "bf16", "activations": "f32", "kv": "f32"},
    "int8 weights": {"weights": "int8", "activations": "f32", "kv": "f32"},
}


def main() -> None:
    """Print one row for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, nargs="+", help="Text files to read. [the topics of Python's help()]")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-windows", type=int, default=MAX_WINDOWS, help=f"[{MAX_WINDOWS}]")
    parser.add_argument("--choice", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    arguments = parser.parse_args()
    folder = open_model_folder(arguments.model)
    paths: list[Path] = arguments.text or []
    texts = [path.read_text(encoding="utf-8") for path in paths] or [default_text()]
    pieces = list(windows(folder, texts))[: arguments.max_windows]
    digest = hashlib.sha256(b"".join(piece.numpy().tobytes() for piece in pieces)).hexdigest()[:16]
    exact, *others = CHOICES
    decoders = {name: open_decoder(folder, CHOICES[name]) for name in [exact, *others] if name in arguments.choice}
    loss, moved, same = dict.fromkeys(decoders, 0.0), dict.fromkeys(decoders, 0.0), dict.fromkeys(decoders, 0)
    largest = dict.fromkeys(decoders, 0.0)
    for piece in track(pieces, "windows", console=Console(stderr=True)):
        reference = logits_of(decoders[exact], piece)
        for name, decoder in decoders.items():
            logits = reference if name == exact else logits_of(decoder, piece)
            loss[name] += torch.nn.functional.cross_entropy(logits[:-1], piece[1:].long(), reduction="sum").item()
            # Adding a constant to all logits has no effect, so differences are relative to the mean.
            moves = (logits - logits.mean(1, keepdim=True)) - (reference - reference.mean(1, keepdim=True))
            moved[name] += moves.square().mean(1).sqrt().sum().item()
            top = reference.topk(64, dim=1).indices
            largest[name] = max(largest[name], moves.gather(1, top).abs().max().item())
            same[name] += int((logits.argmax(1) == reference.argmax(1)).sum())
    table = Table(
        title=f"{len(pieces) * WINDOW:,} tokens of text ({digest}) in windows of {WINDOW}", title_justify="left"
    )
    for column in (
        "computed with",
        "perplexity",
        "change",
        "change of logits (rms)",
        "largest (top 64)",
        "same greedy choice",
    ):
        table.add_column(column, justify="left" if column == "computed with" else "right")
    num_tokens, num_predicted = len(pieces) * WINDOW, len(pieces) * (WINDOW - 1)
    base = loss[exact] / num_predicted
    for name in decoders:
        mean = loss[name] / num_predicted
        perplexity = torch.tensor(mean).exp().item()
        change = torch.tensor(mean - base).exp().item() - 1
        row = (f"{perplexity:.3f}", f"{change:+.3%}", f"{moved[name] / num_tokens:.4f}", f"{largest[name]:.3f}")
        table.add_row(name, *row, f"{same[name] / num_tokens:.2%}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
