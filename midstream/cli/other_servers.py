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
}  # fmt: skip
_OF_OTHERS = {theirs: ours for ours, names in _OURS.items() for theirs in names}


def our_flag(flag: str) -> str:
    """Return our equivalent of another server's flag; return any other flag unchanged."""
    return _OF_OTHERS.get(flag.replace("_", "-"), flag)
