"""Converts a GGUF file's vocabulary to the JSON files of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from midstream.errors import ConfigError, UnsupportedError

Json = dict[str, object]

# GGUF token types.
_UNKNOWN, CONTROL, _USER_DEFINED = 2, 3, 4

_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# How text is split before byte-pair merging, by the value of `tokenizer.ggml.pre`.
_PRE_TOKENIZERS: dict[str, list[Json]] = {
    "default": [_split(_GPT2_PATTERN)],
    "gpt-2": [_split(_GPT2_PATTERN)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _split(_GPT2_PATTERN)],
    "llama-bpe": [_split(_LLAMA3_PATTERN)],
    "qwen2": [_split(_QWEN2_PATTERN)],
}


def build_tokenizer(metadata: Mapping[str, object]) -> tuple[Json, Json]:
    """Return the contents of tokenizer.json and tokenizer_config.json. Raises ConfigError if the vocabulary is missing
    or a special id is out of range, and UnsupportedError if the tokenizer or its pre-tokenizer is not supported.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    kind = str(metadata.get("tokenizer.ggml.model", ""))
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, tokens)
    else:
        raise UnsupportedError(f"GGUF tokenizer {kind!r} is not supported; supported are gpt2 and llama", field="model")
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, **tokenizer}
    added = tokenizer["added_tokens"] = _added_tokens(metadata, tokens)
    # Many files leave the setting out; the default is llama.cpp's.
    usual = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", usual))
    tokenizer["post_processor"] = _post_processor(metadata, tokens) if adds_bos else None
    # Listed here, too, so that finding a token's id does not need the large tokenizer.json.
    listed = {str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in added}
    config = {**_tokenizer_config(metadata, tokens), "add_bos_token": adds_bos, "added_tokens_decoder": listed}
    return tokenizer, config


def _byte_level(metadata: Mapping[str, object], tokens: Sequence[str]) -> Json:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(f"GGUF pre-tokenizer {pre!r} is not known", field="model")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_PRE_TOKENIZERS[pre], byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in _strings(metadata, "tokenizer.ggml.merges")],
            "ignore_merges": pre == "llama-bpe",
        },
    }


def _sentence_piece(metadata: Mapping[str, object], tokens: Sequence[str]) -> Json:
    """Return a tokenizer for a SentencePiece BPE vocabulary. It has scores instead of merges, so each merge is ranked
    by the score of its result.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, (list, tuple)) or len(scores) != len(tokens):
        raise ConfigError("the GGUF file lacks tokenizer.ggml.scores", field="model")
    ranked = [
        (-scores[ids[token]], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend: list[Json] = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[_token_id(unknown, tokens)],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [[left, right] for _, _, _, left, right in sorted(ranked)],
        },
    }


def _added_tokens(metadata: Mapping[str, object], tokens: Sequence[str]) -> list[Json]:
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = types if isinstance(types, (list, tuple)) else ()
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_UNKNOWN, CONTROL, _USER_DEFINED)
    ]


def _post_processor(metadata: Mapping[str, object], tokens: Sequence[str]) -> Json | None:
    """Return the post-processor that adds the BOS token; None if the file names no such token."""
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None:
        return None
    token = tokens[_token_id(bos, tokens)]
    begin: Json = {"SpecialToken": {"id": token, "type_id": 0}}
    first: Json = {"Sequence": {"id": "A", "type_id": 0}}
    second: Json = {"Sequence": {"id": "B", "type_id": 1}}
    special = {token: {"id": token, "ids": [bos], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": special,
    }


def _tokenizer_config(metadata: Mapping[str, object], tokens: Sequence[str]) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[name] = tokens[_token_id(token_id, tokens)]
    return config


def _token_id(value: object, tokens: Sequence[str]) -> int:
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ConfigError(f"special token id {value} lies outside the vocabulary of {len(tokens)}", field="model")
    return value


def _strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"the GGUF file lacks {key}", field="model")
    return value
