"""vLLM in process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .peer import Figures, Paths, Runner, Workload
from .vllm_environment import MAX_SEQUENCE_LENGTH, SETTINGS, Vllm


@dataclass(frozen=True, slots=True)
class VllmEngine(Vllm):
    """vLLM with one number format for weights and computation."""

    @property
    def name(self) -> str:
        return f"vllm-{self.dtype}"

    @property
    def label(self) -> str:
        return f"vLLM, {self.dtype}, in process"

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        os.environ.update(SETTINGS)
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=str(paths.bf16),
            dtype=self.dtype,
            max_model_len=MAX_SEQUENCE_LENGTH,
            max_num_seqs=64,
            enable_prefix_caching=True,
        )

        def run(workload: Workload) -> Figures:
            prompts = [{"prompt_token_ids": list(it.token_ids)} for it in workload.requests]
            sampling = [
                SamplingParams(temperature=0.0, max_tokens=it.max_tokens, ignore_eos=True, detokenize=False)
                for it in workload.requests
            ]
            start = time.perf_counter()
            results = engine.generate(prompts, sampling, use_tqdm=False)
            duration = time.perf_counter() - start
            lengths = [len(result.outputs[0].token_ids) for result in results]
            assert lengths == [it.max_tokens for it in workload.requests], lengths
            return Figures(workload.name, workload.num_counted_tokens / duration, duration)

        yield run
