"""transformers' `generate`: it has no continuous batching, so prompts are padded into static batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .midstream_service import own_python
from .peer import Figures, Paths, Runner, Step, Workload, export_step

BATCH_SIZE = 32
PREFILL_BATCH_SIZE = 1


@dataclass(frozen=True, slots=True)
class Transformers:
    """transformers with one number format for weights and computation."""

    dtype: str
    # With unequal output lengths, static batches would mainly measure the padding.
    workloads: Sequence[str] = ("single", "mixed", "prefill")

    @property
    def name(self) -> str:
        return f"transformers-{self.dtype}"

    @property
    def label(self) -> str:
        return f"transformers generate, {self.dtype}, static batches of {BATCH_SIZE}"

    def python(self, paths: Paths) -> Path:
        return own_python(paths)  # our worker needs transformers and the same PyTorch anyway

    def steps(self, paths: Paths) -> Sequence[Step]:
        return (export_step(paths),)

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(paths.bf16, dtype=getattr(torch, self.dtype))

        def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
            longest = max(map(len, prompts))
            rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
            mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            output = model.generate(
                input_ids=torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            assert output.shape == (len(prompts), longest + max_tokens), output.shape

        def run(workload: Workload) -> Figures:
            size = PREFILL_BATCH_SIZE if workload.counts_input else BATCH_SIZE
            start = time.perf_counter()
            for first in range(0, len(workload.requests), size):
                batch = workload.requests[first : first + size]
                generate([it.token_ids for it in batch], max(it.max_tokens for it in batch))
            duration = time.perf_counter() - start
            return Figures(workload.name, workload.num_counted_tokens / duration, duration)

        yield run
