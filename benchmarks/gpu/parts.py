"""The parts of the GPU benchmark, most important first. This module imports no large package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the benchmark.

    Attributes:
        function: `module:name` in this package; takes a Report.
        limit_s: Time limit in seconds.
        needs_gpu: Whether the part is skipped without a GPU.
    """

    function: str
    limit_s: float
    needs_gpu: bool = True


PARTS = {
    "compile": Part("compiled:fill_cache", 90),
    "runner": Part("checks:check_runner_and_sampling", 90, needs_gpu=False),
    "ceilings": Part("measurements:measure_ceilings", 30),
    "decode": Part("steps:measure_decode", 60, needs_gpu=False),
    "sampled": Part("steps:measure_sampled", 60, needs_gpu=False),
    "mixed": Part("steps:measure_mixed", 45, needs_gpu=False),
    "prefill": Part("steps:measure_prefill", 45, needs_gpu=False),
    "long-context": Part("steps:measure_long_context", 45, needs_gpu=False),
    "dependent-launch": Part("steps:measure_dependent_launch", 60),
    "gap": Part("steps:measure_gap", 45, needs_gpu=False),
    "continuous-batching": Part("against_transformers:compare", 120),
    "attention": Part("kernel_times:measure_attention", 60),
    "lora": Part("steps:measure_lora", 45, needs_gpu=False),
    "expert-lora": Part("steps:measure_expert_lora", 60, needs_gpu=False),
    "drafts": Part("steps:measure_drafts", 45, needs_gpu=False),
    "kv-pool": Part("steps:measure_kv_pool", 30, needs_gpu=False),
    "ranks": Part("ranks:measure_ranks", 90, needs_gpu=False),
    "generate": Part("against_transformers:measure_generate", 60),
    "compiled-generate": Part("against_transformers:measure_compiled_generate", 120),
    "linear": Part("kernel_times:measure_linear", 45),
    "small-kernels": Part("kernel_times:measure_others", 45),
    "profile": Part("steps:measure_profile", 45, needs_gpu=False),
    "check-bfloat16": Part("checks:check_bfloat16", 120),
    "check-float16": Part("checks:check_float16", 120, needs_gpu=False),
    "check-float32": Part("checks:check_float32", 120, needs_gpu=False),
    "check-quantized": Part("checks:check_quantized", 60, needs_gpu=False),
    "check-invariance": Part("checks:check_invariance", 60),
}
