"""Tiny random models made with transformers, as model folders, and a driver that stands in for the scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gpu_worker.batch.step import GREEDY, NOTHING, NewSequence, OutputParams, SamplingParams, Step, StepOutput
from gpu_worker.model_runner import ModelRunner
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder

SHAPE = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}

_READ_IMAGES = frozenset({
    "Idefics3", "SmolVLM", "Llama4", "Qwen3_5", "Qwen3_5Moe", "Llava", "LlavaNext", "Mistral3", "InternVL",
})  # fmt: skip


def auto_class(family: str) -> Any:
    """Return the auto class of transformers that creates models of `family`."""
    # transformers does not list these families among the causal language models.
    return transformers.AutoModelForImageTextToText if family in _READ_IMAGES else transformers.AutoModelForCausalLM


def make_tiny_model(folder: Path, family: str, **settings: Any) -> torch.nn.Module:
    """Write a random model of `family` (such as Llama) to `folder`, and return transformers' model."""
    torch.manual_seed(len(family))
    config_class = getattr(transformers, f"{family}Config")
    if "text_config" in config_class.sub_configs:
        settings["text_config"] = SHAPE | settings["text_config"]
        config = config_class(**settings)
    else:
        config = config_class(**{**SHAPE, **settings})
    # With its eager attention, transformers adds Falcon's ALiBi biases twice.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    model: torch.nn.Module = auto_class(family).from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are larger than usual, so that any mistake is visible in the logits.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.add_(1)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return model


def make_runner(folder: Path | str, **settings: Any) -> ModelRunner:
    """Return a CPU runner with a small KV pool and one thread; more threads would be slower while tests run in
    parallel.
    """
    defaults = {"device": "cpu", "max_kv_tokens": 4096, "max_batch_size": 8, "num_threads": 1}
    config = WorkerConfig(**{**defaults, **settings})
    return ModelRunner(config, open_model_folder(str(folder)))


def ints(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


class Driver:
    """A stand-in for the scheduler that assigns rows and blocks, and stores sampled tokens."""

    def __init__(self, runner: ModelRunner, tokens_per_block: int = 16) -> None:
        runner.clear()
        self.runner = runner
        self._tokens_per_block = tokens_per_block
        self._free = list(range(runner.kv.num_blocks))
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}

    def sequence(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        shared_blocks: Sequence[int] = (),
        sequence_index: int = 0,
        outputs: OutputParams = NOTHING,
    ) -> NewSequence:
        """Create a sequence that may grow by 64 tokens; its block table starts with `shared_blocks`."""
        num_blocks = -(-(len(tokens) + 64) // self._tokens_per_block)
        own = [self._free.pop() for _ in range(num_blocks - len(shared_blocks))]
        self.blocks[row] = [*shared_blocks, *own]
        self.tokens[row] = list(tokens)
        self.num_prompt[row] = num_prompt_tokens or len(tokens)
        return NewSequence(
            row=row,
            token_ids=ints(tokens),
            num_prompt_tokens=self.num_prompt[row],
            block_ids=ints(self.blocks[row]),
            sampling=sampling,
            sequence_index=sequence_index,
            outputs=outputs,
        )

    def step(
        self,
        new: Sequence[NewSequence] = (),
        contexts: Sequence[tuple[int, int, int]] = (),
        generation: Sequence[int] = (),
        **more: Any,
    ) -> StepOutput:
        """Run a step; each context is (row, start, length)."""
        context_rows, starts, lengths = zip(*contexts, strict=True) if contexts else ((), (), ())
        output = self.runner.run_step(
            Step(
                new_sequences=tuple(new),
                context_rows=ints(context_rows),
                context_starts=ints(starts),
                context_lengths=ints(lengths),
                generation_rows=ints(generation),
                **more,
            )
        )
        sampled = [row for row, start, length in contexts if start + length == len(self.tokens[row])]
        for row, token in zip([*sampled, *sorted(generation)], output.token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
        return output

    def output(self, row: int) -> list[int]:
        """Return the tokens sampled for `row`."""
        return self.tokens[row][self.num_prompt[row] :]

    def release(self, row: int) -> None:
        """Free a row and the blocks that only it uses."""
        self._free += self.blocks.pop(row)
        self.step(released_rows=ints([row]))

    def run_alone(
        self, tokens: Sequence[int], num_new: int, sampling: SamplingParams = GREEDY, *, chunk: int = 10**9
    ) -> list[int]:
        """Run one sequence alone, and return the tokens sampled for it."""
        new = [self.sequence(0, tokens, sampling)]
        for start in range(0, len(tokens), chunk):
            self.step(new, [(0, start, min(chunk, len(tokens) - start))])
            new = []
        for _ in range(num_new - 1):
            self.step(generation=[0])
        output = self.output(0)
        self.release(0)
        return output
