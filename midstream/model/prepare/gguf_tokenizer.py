"""Converts a GGUF file's vocabulary to the JSON files of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.prepare.gguf_special_tokens import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SpecialTokens,
    special_tokens_of,
)

Json = dict[str, object]

_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT4O_PATTERN = (
    _TEKKEN_PATTERN.replace(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?|")
    .replace(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_QWEN35_PATTERN = _QWEN2_PATTERN.replace(r"\p{N}]?\p{L}+", r"\p{N}]?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_PATTERN = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters that have cases, without those of Georgian that got theirs late.
_CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^ა-ჿ]]"
_BLOOM_PATTERN = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True, slots=True)
class _Words:
    """How text becomes words before byte-pair merging.

    Attributes:
        steps: Pre-tokenizers that split the text.
        ignores_merges: Whether a word that is an entry of the vocabulary is one token, whatever the merges.
        adds_bos: Whether a text begins with the start token if the file does not say so.
        normalizes: Whether characters are composed first (NFC), as the models' own tokenizers do. llama.cpp does not.
    """

    steps: tuple[Json, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False


_GPT2 = _Words((_split(_GPT2_PATTERN),))
_SINGLE_DIGITS = _Words((_split(r"\p{N}"), _split(_GPT2_PATTERN)))
_LLAMA3 = _Words((_split(_LLAMA3_PATTERN),), ignores_merges=True, adds_bos=True)
_QWEN2 = _Words((_split(_QWEN2_PATTERN),), normalizes=True)
# llama.cpp's default, which it uses for files without `tokenizer.ggml.pre`.
_DEFAULT = _Words(
    (_split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2_PATTERN), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"))
)
# By the value of `tokenizer.ggml.pre`, as in src/llama-vocab.cpp of llama.cpp 0c1e570.
_WORDS: dict[str, _Words] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "modern-bert",
        ),
        _GPT2,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), replace(_LLAMA3, ignores_merges=False, adds_bos=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), replace(_QWEN2, normalizes=False)),
    "qwen35": _Words((_split(_QWEN35_PATTERN),)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _Words((_split(_GPT4O_PATTERN),))),
    "chatglm-bpe": replace(_LLAMA3, ignores_merges=False, adds_bos=False),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, adds_bos=False)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        _Words((_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(_DEEPSEEK3_PATTERN))),
    ),
    "deepseek-llm": _Words(
        tuple(
            map(
                _split,
                (
                    r"[\r\n]",
                    rf"\s?{_CASED}+",
                    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
                    r"\s+$",
                    "[一-龥ࠀ-一가-\ud7ff]+",
                    r"\p{N}+",
                ),
            )
        )
    ),
    "deepseek-coder": _Words(
        tuple(map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")))
    ),
    "falcon": _Words((_split(r"[\p{P}\$\+<=>\^~\|`]+"), _split(_GPT2_PATTERN), _split("[0-9][0-9][0-9]"))),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _Words((_split(_BLOOM_PATTERN),))),
    "viking": _Words((_split(_BLOOM_PATTERN), _split(r"\p{N}"))),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        _Words(
            (
                _split(
                    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]|\s+(?!\S)|\s+"
                ),
            )
        ),
    ),
    "seed-coder": _Words((_split(_QWEN2_PATTERN.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")),)),
    "tekken": _Words((_split(_TEKKEN_PATTERN),), ignores_merges=True, adds_bos=True),
}


def build_tokenizer(metadata: Mapping[str, object]) -> tuple[Json, Json]:
    """Return the contents of tokenizer.json and tokenizer_config.json. Raises ConfigError if the vocabulary is missing
    or a special id is out of range, and UnsupportedError if the tokenizer or its pre-tokenizer is not supported.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    special = special_tokens_of(metadata)
    kind = str(metadata.get("tokenizer.ggml.model", ""))
    if kind == "gpt2":
        words = _words(metadata)
        tokenizer, adds_bos = _byte_level(metadata, tokens, words), words.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentence_piece(metadata, tokens, special), True
    elif kind == "bert":
        tokenizer, adds_bos = _word_pieces(tokens, special), True
    else:
        raise UnsupportedError(
            f"GGUF tokenizer {kind!r} is not supported; supported are gpt2, llama and bert", field="model"
        )
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, **tokenizer}
    added = tokenizer["added_tokens"] = _added_tokens(tokens, special)
    # Many files leave the settings out; the defaults are llama.cpp's.
    adds = {
        key: bool(metadata.get(f"tokenizer.ggml.add_{key}_token", default))
        for key, default in (("bos", adds_bos), ("eos", False), ("sep", False))
    }
    tokenizer["post_processor"] = (
        _start_and_separators(tokens, special) if kind == "bert" else _post_processor(adds, tokens, special)
    )
    tokenizer["model"] = tokenizer.pop("model")  # the last section, as the library writes it, and read only if needed
    # Listed here, too, so that finding a token's id does not need the large tokenizer.json.
    listed = {str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in added}
    flags = {f"add_{key}_token": adds[key] for key in ("bos", "eos")}
    return tokenizer, {**_tokenizer_config(tokens, special), **flags, "added_tokens_decoder": listed}


def _words(metadata: Mapping[str, object]) -> _Words:
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    if pre not in _WORDS:
        raise UnsupportedError(
            f"GGUF pre-tokenizer {pre!r} is not supported; supported are {', '.join(_WORDS)}", field="model"
        )
    return _WORDS[pre]


def _byte_level(metadata: Mapping[str, object], tokens: Sequence[str], words: _Words) -> Json:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if words.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words.steps, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in _strings(metadata, "tokenizer.ggml.merges")],
            "ignore_merges": words.ignores_merges,
        },
    }


def _sentence_piece(metadata: Mapping[str, object], tokens: Sequence[str], special: SpecialTokens) -> Json:
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
            "unk_token": tokens[special.ids["unknown"]],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [[left, right] for _, _, _, left, right in sorted(ranked)],
        },
    }


def _word_pieces(tokens: Sequence[str], special: SpecialTokens) -> Json:
    """Return a tokenizer for a WordPiece vocabulary. The file marks the pieces that begin a word, by `▁`; the library
    marks all others. The file does not say whether text becomes lower case: it does unless the vocabulary has capitals.
    """
    missing = next((key for key in ("bos", "seperator", "unknown") if key not in special.ids), None)
    if missing is not None:
        raise ConfigError(f"the GGUF file lacks tokenizer.ggml.{missing}_token_id", field="model")
    kinds = special.types
    pieces = [
        token if kind in (UNKNOWN, CONTROL, USER_DEFINED) else token[1:] if token.startswith("▁") else f"##{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    has_capitals = any(
        any("A" <= letter <= "Z" for letter in token)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == NORMAL and not token.startswith("[")
    )
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not has_capitals,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": pieces[special.ids["unknown"]],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
        },
    }


def _start_and_separators(tokens: Sequence[str], special: SpecialTokens) -> Json:
    """Return the post-processor of BERT, which llama.cpp applies whatever the file says."""
    (start, start_id), (end, end_id) = ((tokens[special.ids[key]], special.ids[key]) for key in ("bos", "seperator"))
    begin = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    begin.append({"SpecialToken": {"id": end, "type_id": 0}})
    more = [{"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": end, "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, *more],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in ((start, start_id), (end, end_id))
        },
    }


def _added_tokens(tokens: Sequence[str], special: SpecialTokens) -> list[Json]:
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, special.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _post_processor(adds: Mapping[str, bool], tokens: Sequence[str], special: SpecialTokens) -> Json | None:
    """Return the post-processor that adds the start, end and separator tokens; None if there is nothing to add.

    `adds` tells which of `bos`, `eos` and `sep` are added: as in llama.cpp, the start token before the first text, the
    end token after every text, and the separator between two texts.
    """
    if not any(adds.values()):
        return None
    added: dict[str, Json] = {}

    def place(key: str) -> list[Json]:
        if not adds[key]:
            return []
        name = "seperator" if key == "sep" else key  # the key of GGUF is spelled so
        if name not in special.ids:
            raise ConfigError(
                f"tokenizer.ggml.add_{key}_token is true, but the file lacks tokenizer.ggml.{name}_token_id",
                field="model",
            )
        token_id = special.ids[name]
        token = tokens[token_id]
        added[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        return [{"SpecialToken": {"id": token, "type_id": 0}}]

    first: Json = {"Sequence": {"id": "A", "type_id": 0}}
    second: Json = {"Sequence": {"id": "B", "type_id": 1}}
    single = [*place("bos"), first, *place("eos")]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *place("sep"), second, *place("eos")],
        "special_tokens": added,
    }


def _tokenizer_config(tokens: Sequence[str], special: SpecialTokens) -> Json:
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = special.ids.get(key)
        # A token named here becomes special, but a default id may belong to ordinary text.
        if token_id is not None and (key in special.named or special.types[token_id] in (UNKNOWN, CONTROL)):
            config[name] = tokens[token_id]
    return config


def _strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"the GGUF file lacks {key}", field="model")
    return value
