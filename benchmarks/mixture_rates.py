"""Compare a mixture of experts with a dense model of the same active size: `python -m benchmarks.mixture_rates`.

Both have random int4 weights and run in turn in one process, on one thread; steps are measured in CPU time. Prints the
token rate of the mixture relative to the dense model, and how many times the weights of the dense model a step has to
read: the rows share a dense layer, but each row chooses its own experts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from gpu_worker.batch.step import GREEDY, NewSequence, Step
from gpu_worker.model_runner import ModelRunner
from gpu_worker.quantize import quantize_folder
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder

NUM_EXPERTS, NUM_ACTIVE = 8, 2
CONTEXT = 64
_BLOCK = 16


class Contender:
    """A model, with rows that decode together."""

    def __init__(self, folder: Path) -> None:
        config = WorkerConfig(device="cpu", num_threads=1, max_kv_tokens=32_768, max_batch_size=128)
        self._runner = ModelRunner(config, open_model_folder(str(folder)))

    def start(self, num_rows: int) -> None:
        """Prefill prompts that consist of random tokens."""
        self._runner.clear()
        rows = np.arange(num_rows, dtype=np.int32)
        blocks = 2 * CONTEXT // _BLOCK
        tokens = np.random.default_rng(num_rows).integers(3, 1000, (num_rows, CONTEXT)).astype(np.int32)
        for row in rows:
            sequence = NewSequence(
                row=int(row),
                token_ids=tokens[row],
                num_prompt_tokens=CONTEXT,
                block_ids=np.arange(blocks, dtype=np.int32) + row * blocks,
                sampling=GREEDY,
            )
            one = rows[row : row + 1]
            self._runner.run_step(
                Step(
                    new_sequences=(sequence,),
                    context_rows=one,
                    context_starts=0 * one,
                    context_lengths=np.full_like(one, CONTEXT),
                )
            )
        self._runner.run_step(Step(generation_rows=rows))

    def time(self, num_steps: int) -> float:
        """Return the CPU time of a step in milliseconds."""
        started = time.thread_time()
        for _ in range(num_steps):
            self._runner.run_step(Step(repeat_generation=True))
        return 1e3 * (time.thread_time() - started) / num_steps


def make(folder: Path, config: transformers.PretrainedConfig) -> Contender:
    """Create a model with random int4 weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "random")
    (folder / "random" / "tokenizer.json").write_text("{}")
    quantize_folder(open_model_folder(str(folder / "random")), folder / "int4", "int4")
    return Contender(folder / "int4")


def weights_read(arguments: argparse.Namespace, num_rows: int) -> float:
    """Return the amount of layer weights that a step of the mixture reads, relative to the dense model.

    Rows choose experts independently of each other.
    """
    attention = 2.5 * arguments.hidden_size**2
    dense = 3.0 * arguments.hidden_size * arguments.active_size
    share: float = 1 - (1 - NUM_ACTIVE / NUM_EXPERTS) ** num_rows
    read: float = (attention + dense * share * NUM_EXPERTS / NUM_ACTIVE) / (attention + dense)
    return read


def main() -> None:
    """Print one row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument(
        "--active-size", type=int, default=2816, help="Intermediate size of the dense layer, and of two experts. [2816]"
    )
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 2, 4, 8, 16, 64))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="Steps of each model in a round. [4]")
    arguments = parser.parse_args()
    shape = {
        "vocab_size": 1024,
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": arguments.hidden_size // 64,
        "num_key_value_heads": arguments.hidden_size // 256,
    }
    table = Table(title=f"{NUM_EXPERTS} experts, {NUM_ACTIVE} active, compared with a dense model; int4, one thread")
    for column in ("streams", "dense ms", "mixture ms", "rate, median", "rate, best", "weights read"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as name:
        dense = make(Path(name) / "dense", transformers.MistralConfig(**shape, intermediate_size=arguments.active_size))
        experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE}
        size = arguments.active_size // NUM_ACTIVE
        mixture = make(Path(name) / "mixture", transformers.MixtralConfig(**shape, **experts, intermediate_size=size))
        for streams in arguments.streams:
            for contender in (dense, mixture):
                contender.start(streams)
            rounds = [(dense.time(arguments.steps), mixture.time(arguments.steps)) for _ in range(arguments.rounds)]
            one, other = (min(times) for times in zip(*rounds, strict=True))
            median = statistics.median(a / b for a, b in rounds)
            table.add_row(
                *(str(streams), f"{one:.2f}", f"{other:.2f}", f"{median:.2f}", f"{one / other:.2f}"),
                f"{weights_read(arguments, streams):.2f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
