"""Generates docs/models.md: the supported model families, as shown by `midstream models`."""

from __future__ import annotations

from pathlib import Path

from midstream.model.families import HEADINGS, rows
from tests.features import proofs

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

Encoders give embeddings and, with a classification head, scores and classes
([adapters.md](adapters.md#embeddings-scores-reranking-classes)). `tests/gpu_worker/test_encoders.py` compares them with
transformers, and `tests/faults/test_encoders.py` with sentence-transformers: within 1e-4, with the same bits in any
batch on a CPU.

"""
_PROOFS = """
## How families are verified

This table is made from the tests themselves (`tests/features/proofs.py`). The tests of the first four columns run with
every change:

- *everything*: logits within 1e-4 of transformers, also with LoRA adapters and on two tensor ranks, and equal bits in
  chunks, in batches, with a cached prefix and after the loss of a worker at any step
- *logits*: the first of these; the others with `TEST_ALL_FAMILIES=1`
- *images*: a prompt with several images of different sizes gives the logits, within 1e-4, and the greedy tokens of
  transformers (`tests/gpu_worker/test_images.py`)
- *Triton's interpreter*: the kernels of GPUs under the whole decoder; each kernel also has tests of its own
- *real weights*: the greedy tokens of the model that a package carries; there are no packages with others
- *GPU*: run by the [benchmark](gpu.md#measuring) on one H100, not by tests

"""
_TOKENIZERS = """

## Images

Models of these families read images ([requests.md](requests.md#images-images-chatmessagesparts)); what differs between
them is in `gpu_worker/models/image_families.py`:

| model_type | vision encoder | image token | text of an image |
| --- | --- | --- | --- |
| idefics3, smolvlm (also SmolVLM 2) | SigLIP | `<image>` | tiles with their rows and columns, and the whole image |
| llava | CLIP, or another that transformers accepts | `<image>` | image tokens |
| llava (Pixtral), mistral3 | Pixtral | `[IMG]` | rows of image tokens, `[IMG_BREAK]` between them, `[IMG_END]` |
| llava_next (also Granite Vision) | CLIP, SigLIP | `<image>` | image tokens |
| internvl (repositories `-hf`) | InternVL | `<IMG_CONTEXT>` | image tokens between `<img>` and `</img>` |

The image token is that of config.json, and the names in the table are those of published models. Language models are
Llama, Mistral, Qwen 2, Qwen 3 and Granite. Vision encoders are not quantized, and image processors are those of
transformers that need only Pillow.

Other models of text and images generate from text only, and reject images:

- Gemma 3: the tokens of an image attend to each other in both directions, so that a chunk of a prompt could not end
  within an image, nor could a cached prefix.
- Qwen 2 VL to Qwen 3.5: the tokens of an image have positions in two dimensions (M-RoPE), and so the positions after it
  are not those in the sequence. Of these, only Qwen 3.5 is in the table above.
- LLaVA-OneVision (not served): how an image is encoded depends on the number of images in the prompt.

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


_FILES = """
## Files

`midstream check MODEL` reports, without loading weights, what each file of a folder contributes, which settings are
used, ignored (with the reason) or refused, at which tokens outputs end and why, and what the chat template takes. Its
exit status is 1 if the model cannot be served as it is.

**Checkpoints** of safetensors may be of a whole model or of its part without a head, whose tensors have no prefix
`model.`, as `Qwen3Model.save_pretrained` and models for embeddings are. If config.json has `tie_word_embeddings: true`,
the one matrix may be stored as the embedding or as the head. If it has `false` and there is no head, the model has
hidden states: embeddings, and scores and reranking by them, work, and other requests are refused. Tensors may have 16,
32 or 64 bits. A folder without tokenizer.json, but with `tokenizer.model` (this requires the package sentencepiece) or
`vocab.json` and `merges.txt`, is converted by `midstream prepare FOLDER --output NEW_FOLDER`.

**GGUF files** of the families in the table give the logits of transformers; tests also compare their greedy tokens with
llama.cpp's. Where the two differ, the model is computed as in transformers: Phi-3 has its window, and the frequencies
of gpt-oss are not rounded. OLMo 3's files have the architecture of OLMo 2, and Mistral's and Mixtral's that of Llama.
Files of DeepSeek-V2, whose experts are chosen otherwise, are refused. Layers for predicting several tokens (GLM-4.5)
are not read.

They may be in parts (`NAME-00001-of-00003.gguf`); name any of them. They may have a byte-level (`gpt2`), SentencePiece
(`llama`) or WordPiece (`bert`) vocabulary; others, such as `t5`, are refused. Their special tokens follow the rules of
llama.cpp (version 0c1e570, `src/llama-vocab.cpp`); tests compare them with llama.cpp itself:

- `add_bos_token`, `add_eos_token` and `add_sep_token` decide which tokens a text gets; the defaults are those of
  `tokenizer.ggml.model` and `.pre`. `add_space_prefix` has an effect only on SentencePiece vocabularies.
- Outputs end at the tokens that the file names (`eos`, `eot`, `eom`, and for fill-in-the-middle `fim_pad`, `fim_rep`
  and `fim_sep`) and at every token whose text is one of about 20 known ones, such as `<|im_end|>`, `<|endoftext|>` or
  `<end_of_turn>`, whatever its type. `<|end|>` does not end an output if there are `<|return|>` and `<|call|>`. If the
  file names no end token, it is token 2 of SentencePiece vocabularies and token 11 of byte-level ones.
- Tokens with such texts are special tokens even if the file calls them normal or user-defined.
- Without `tokenizer.ggml.pre`, or with `default`, text is split into words as llama.cpp's default does; unknown
  pre-tokenizers are refused.
- A text of word pieces begins with `bos` and ends with the separator, by default tokens 101 and 102, whatever the file
  says. It becomes lower case unless the vocabulary has capitals, for which llama.cpp makes no exception.

The weights of encoders are expanded, so that a file takes as much memory as safetensors. `pooling_type` decides how the
vector of a text is made. Rerankers and classifiers are refused.
"""


def page() -> str:
    """Return the text of docs/models.md."""
    families, verified = _table(HEADINGS, rows()), _table(proofs.HEADINGS, proofs.rows())
    return _HEAD + families + _PROOFS + verified + _TOKENIZERS + _FILES


def _table(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ("---",) * len(headings), *lines)) + "\n"
