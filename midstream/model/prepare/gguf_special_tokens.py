"""The special tokens of a GGUF vocabulary, by llama.cpp's rules.

Files name few of their special tokens, and converters often mark them as ordinary text. llama.cpp therefore finds more
of them by their texts and ignores the marks. The rules here are those of `llama_vocab::impl::load` in
src/llama-vocab.cpp of llama.cpp 0c1e570 (2026-10-01, as in llama-cpp-python 0.3.36). Where several tokens have a text
of one kind of fill-in-the-middle token, llama.cpp takes any of them, and we take the one with the smallest id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midstream.errors import ConfigError

# GGUF token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

# Tokens with these texts are control tokens and end an output.
END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    }
)  # fmt: skip
# Texts of fill-in-the-middle tokens, which are control tokens, by the key with which a file can name the token. Those
# for padding, repositories and files also end an output.
_FILL_IN_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
_OLDER_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# Control tokens of gpt-oss that are part of the text.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Ids that a file does not name, by the kind of its vocabulary (`tokenizer.ggml.model`).
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0},
}
# Pre-tokenizers whose vocabularies have no default start token.
_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a vocabulary.

    Attributes:
        ids: Token ids by the names of the keys `tokenizer.ggml.*_token_id`, including defaults.
        named: The ids that the file names itself.
        ends: Ids of the tokens that end an output: those that the file names, then the others in ascending order.
        types: The type of each token, after the corrections.
    """

    ids: Mapping[str, int]
    named: Mapping[str, int]
    ends: tuple[int, ...]
    types: Sequence[int]


def special_tokens_of(metadata: Mapping[str, object]) -> SpecialTokens:
    """Return the special tokens of a file's vocabulary. Raises ConfigError if an id lies outside the vocabulary."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    types = _types(metadata, len(tokens))
    by_text = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    keys = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", *_FILL_IN_TEXTS)
    named = {key: token_id for key in keys if (token_id := _named_id(metadata, key, len(tokens))) is not None}
    ids = {key: token_id for key, token_id in _defaults(metadata).items() if token_id < len(tokens)} | named
    for key, texts in _FILL_IN_TEXTS.items():
        found = [by_text[text] for text in texts if text in by_text]
        if key not in ids and found:
            ids[key] = min(found)
            types[ids[key]] = CONTROL
    by_end_text = sorted(by_text[text] for text in END_TEXTS if text in by_text)
    for token_id in by_end_text:
        types[token_id] = CONTROL
    for text in _SHOWN_TEXTS:
        if text in by_text:
            types[by_text[text]] = USER_DEFINED
    ends = [ids[key] for key in ("eos", "eot", "eom", *_FILL_IN_ENDS) if key in ids]
    ends = list(dict.fromkeys([*ends, *by_end_text]))
    for text, kind in _not_ends({tokens[token_id] for token_id in ends}).items():
        ends.remove(by_text[text])
        types[by_text[text]] = kind
    return SpecialTokens(ids, named, tuple(ends), types)


def _not_ends(ends: set[str]) -> dict[str, int]:
    """Return the texts among `ends` that do not end an output in the presence of the others, with their types."""
    found = {}
    calls = bool(ends & {"<|call|>", "<|calls|>"})
    if "<|end|>" in ends and calls and ends & {"<|return|>", "<|flush|>"}:  # gpt-oss, Solar Open
        found["<|end|>"] = USER_DEFINED
    if "</s>" in ends and ends & {"<|tool_response>", "<|plamo:eos|>"}:  # Gemma 4, PLaMo
        found["</s>"] = NORMAL
    return found


def _types(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    """Return the type of each token; without types, all are normal."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * num_tokens
    if not isinstance(types, list) or len(types) < num_tokens:
        raise ConfigError(f"tokenizer.ggml.token_type must have {num_tokens} values", field="model")
    return types[:num_tokens]


def _defaults(metadata: Mapping[str, object]) -> dict[str, int]:
    ids = dict(_DEFAULT_IDS.get(str(metadata.get("tokenizer.ggml.model")), {}))
    if metadata.get("tokenizer.ggml.pre") in _WITHOUT_BOS:
        del ids["bos"]
    return ids


def _named_id(metadata: Mapping[str, object], key: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None and key in _OLDER_KEYS:
        value = metadata.get(f"tokenizer.ggml.{_OLDER_KEYS[key]}_token_id")
    if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
        raise ConfigError(f"special token id {value} lies outside the vocabulary of {num_tokens}", field="model")
    return value
