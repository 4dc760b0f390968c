"""Generates docs/models.md: the supported model families, as shown by `midstream models`."""

from __future__ import annotations

from pathlib import Path

from midstream.model.families import HEADINGS, rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Models

This page lists the supported families of models; `midstream models` shows the same table. It is generated from
`midstream/model/families.py` by `python -m tests.features`. Tests compare each family, as a tiny random model, with
transformers: our own implementation in `tests/gpu_worker/test_families.py`, and the transformers implementation in
`tests/gpu_worker/test_transformers_model.py`. For our own implementation, the logits are within 1e-4 of those of
transformers (relative to the largest logit), and tests show that their bits do not change if the prompt is computed in
chunks of 1, 7 or 64 tokens, in a batch of 32 sequences, or with a cached prefix, or if the worker is lost at any step.
Some types are tested briefly by default, and completely with `TEST_ALL_FAMILIES=1`.

On a CPU, families marked "CPU kernels" use the C++ kernels; the others use PyTorch operations, which are slower. On a
GPU, our own implementation uses Triton kernels, except for recurrent layers, whose state is stored with the KV blocks
([decision](decisions/recurrent-state.md)). LoRA adapters of experts need `--kernels torch` on a CPU
([lora.md](lora.md)). Other causal language models run with the transformers implementation if it uses transformers'
attention interface; [gpu.md](gpu.md) lists the models that are rejected, and [features.md](features.md) the features
that requests may use.

"""
_TAIL = """
## Tokenizers

A folder needs tokenizer.json. Tokens and special tokens that only other files declare are added to it as transformers'
`PreTrainedTokenizerFast` does; `tests/midstream/test_tokenizer_file.py` compares every combination of these places:

| file | settings |
| --- | --- |
| tokenizer_config.json | `added_tokens_decoder`, `bos_token` to `mask_token`, any other key that ends in `_token` |
| | `model_specific_special_tokens`, `extra_special_tokens`, `additional_special_tokens` |
| | `split_special_tokens` |
| special_tokens_map.json, added_tokens.json | all, if tokenizer_config.json has no `added_tokens_decoder` |
| tokenizer.json | all; of `padding` only the token, and no `truncation` |

A token is special, and by default not part of the text, if any of these places says so, or if it is listed as an added
token and one of the keys names it. No other setting of tokenizer_config.json changes tokens or text: `add_bos_token`,
`add_eos_token`, `add_prefix_space`, `legacy` and the like have no effect in transformers either if there is a
tokenizer.json, and `clean_up_tokenization_spaces`, which removes spaces before punctuation from the whole text, is
logged.

Text is decoded step by step by every kind of decoder that the tokenizers library has, in any order, and the text of a
stream is that of all tokens at once. Some unusual decoders change text that came before, such as a `Replace` with a
regular expression after `Fuse`; their text is sent at the end.
"""


def page() -> str:
    """Return the text of docs/models.md."""
    lines = [
        f"| {' | '.join(HEADINGS)} |",
        "| --- " * len(HEADINGS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL
