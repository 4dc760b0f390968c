"""GGUF files that consist of little more than a vocabulary, and what llama.cpp says about them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

# A Python with the package xllamacpp, which contains llama.cpp.
LLAMA_CPP_PYTHON = os.environ.get("LLAMA_CPP_PYTHON", "")
needs_llama_cpp = pytest.mark.skipif(not LLAMA_CPP_PYTHON, reason="LLAMA_CPP_PYTHON is not set")


def write_vocabulary(path: Path, metadata: Mapping[str, object]) -> Path:
    """Write a file with `metadata` of the tokenizer, and a Llama of width 32 with one layer of zeros."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, list)
            writer.add_array(key, value)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    for name in names:
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ask_llama_cpp(file: Path, texts: Sequence[str] = (), **requests: Any) -> dict[str, Any]:
    """Return what llama.cpp says about a GGUF file: `ends`, the ids that end an output; `tokens`, the ids of `texts`
    with special tokens; `plain`, the ids of `texts` if only user-defined tokens are found in them; and the answers to
    `requests`, as its script describes.
    """
    script = Path(__file__).with_name("llama_cpp_process.py")
    command = [LLAMA_CPP_PYTHON, str(script), str(file)]
    given = json.dumps({"texts": list(texts), **requests})
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, errors="replace", timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    log = (done.stdout + done.stderr).splitlines()
    lines = (line.split("EOG token", 1)[1].split() for line in log if "EOG token   " in line)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"ends": sorted({int(words[1]) for words in lines})}
