#!/bin/sh
# transformers reads GGUF vocabularies of BPE with GPT-2's pre-tokenizer where it does not know the one that the file names.
#
# `tokenizer.ggml.pre` names the pre-tokenizer of a GGUF file. llama.cpp (0c1e570, src/llama-vocab.cpp) splits digits
# one by one for `smollm`, `deepseek-coder` and `qwen2`, and refuses names that it does not know.
# Guess before the run: `AutoTokenizer.from_pretrained(..., gguf_file=...)` applies what the file names, or refuses it.
# Seen with transformers 5.23.0 and gguf 0.19.0, with a vocabulary of the bytes and the token `12`: `qwen2` gives `1`, `2`;
# `smollm`, `deepseek-coder` and an invented name give `12`, without a warning. Ids then differ from those of llama.cpp and of the
# original tokenizer wherever the vocabulary has tokens of several digits.
#
# Needs python3. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 2>/dev/null
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'END'
import sys

import numpy as np
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

folder = sys.argv[1]
TOKENS = [*sorted(ByteLevel.alphabet()), "12", "<|endoftext|>"]


def tokens_with(pre):
    name = f"{pre}.gguf"
    writer = GGUFWriter(f"{folder}/{name}", "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.NORMAL] * 257 + [TokenType.CONTROL])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_tensor("token_embd.weight", np.zeros((258, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(folder, gguf_file=name).tokenize("12")


found = {pre: tokens_with(pre) for pre in ("qwen2", "gpt-2", "smollm", "deepseek-coder", "invented")}
print(found)
assert found["qwen2"] == ["1", "2"], found
assert found["gpt-2"] == found["smollm"] == found["deepseek-coder"] == found["invented"] == ["12"], found
END
