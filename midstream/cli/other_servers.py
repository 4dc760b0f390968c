"""Flags of other inference servers, so that error messages can name Midstream's equivalents."""

from __future__ import annotations

# vLLM, SGLang, Text Generation Inference and trtllm-serve; docs/migration.md has the same pairs.
_OURS = {
    "--model": ("--model-path", "--model-id"),
    "--host": ("--hostname",),
    "--tensor-parallel": ("--tensor-parallel-size", "--tp-size", "--num-shard", "-tp", "--tp"),
    "--pipeline-parallel": ("--pipeline-parallel-size", "--pp-size", "-pp", "--pp"),
    "--workers": ("--data-parallel-size", "--dp-size", "-dp", "--dp"),
    "--max-sequence-length": ("--max-model-len", "--context-length", "--max-total-tokens", "--max-seq-len"),
    "--max-batch-size": ("--max-num-seqs", "--max-running-requests"),
    "--max-num-tokens": ("--max-num-batched-tokens", "--chunked-prefill-size", "--max-batch-prefill-tokens"),
    "--max-queue-size": ("--max-queued-requests", "--max-concurrent-requests"),
    "--free-memory-fraction": (
        "--gpu-memory-utilization", "--mem-fraction-static", "--cuda-memory-fraction",
        "--kv-cache-free-gpu-memory-fraction",
    ),
    "--kv": ("--kv-cache-dtype",),
    "--tokens-per-block": ("--block-size", "--page-size"),
    "--tool-parser": ("--tool-call-parser",),
    "--draft-model": ("--speculative-model", "--speculative-draft-model-path"),
    "--lora-max-adapter-size": ("--max-lora-rank",),
    "--expert-parallel": ("--enable-expert-parallel", "-ep"),
}  # fmt: skip
# Flags without an equivalent, and what to do instead.
_NOT_NEEDED = {
    "tool calls are parsed without a flag": ("--enable-auto-tool-choice", "--jinja"),
    "prefixes are reused by default; MIDSTREAM_ENABLE_BLOCK_REUSE=false turns this off": (
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--disable-radix-cache",
    ),
    "prompts are split by default; MIDSTREAM_ENABLE_CHUNKED_CONTEXT=false turns this off": (
        "--enable-chunked-prefill", "--no-enable-chunked-prefill",
    ),
    "adapters need no flag: midstream lora load NAME PATH, with MIDSTREAM_ADAPTER_ROOT=FOLDER for the service": (
        "--enable-lora", "--lora-modules", "--lora-paths", "--lora-adapters",
    ),
    "weights keep the data type of their files; MIDSTREAM_WEIGHTS selects another": ("--dtype",),
    "the format is read from the model's files; MIDSTREAM_WEIGHTS quantizes weights when they are loaded": (
        "--quantization", "-q", "--quantize", "--load-format",
    ),
    "code in a model's folder is never executed": ("--trust-remote-code", "--trust-remote-code-trt"),
    "MIDSTREAM_DRAFT_MODEL=MODEL adds a draft model; requests can ask for prompt lookup": (
        "--speculative-config", "--speculative-algorithm", "--speculate", "--num-speculative-tokens",
    ),
    "MIDSTREAM_CUDA_GRAPHS=false turns CUDA graphs off": ("--enforce-eager", "--disable-cuda-graph"),
    "requests are logged only with MIDSTREAM_ACCESS_LOG=true": ("--disable-log-requests", "--enable-log-requests"),
}  # fmt: skip
_ADVICE = {theirs: advice for advice, names in _NOT_NEEDED.items() for theirs in names}
_OF_OTHERS = {theirs: ours for ours, names in _OURS.items() for theirs in names}


def our_flag(flag: str) -> str:
    """Return our equivalent of another server's flag; return any other flag unchanged."""
    return _OF_OTHERS.get(flag.replace("_", "-"), flag)


def advice_for(flag: str) -> str:
    """Return what to do instead of another server's flag that has no equivalent; empty for any other flag."""
    return _ADVICE.get(flag.replace("_", "-"), "")
