"""Tokens of GGUF vocabularies, compared with llama.cpp.

The tables contain what llama.cpp answers. With LLAMA_CPP_PYTHON set to a Python with the package xllamacpp (tested:
2026.10.11549, llama.cpp of October 2026), the same tests ask it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from midstream.model.prepare.gguf_special_tokens import END_TEXTS
from midstream.model.prepare.gguf_tokenizer import build_tokenizer
from midstream.model.token_bytes import byte_level_alphabet
from tests.midstream.gguf_vocabularies import ask_llama_cpp, needs_llama_cpp, write_vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_ALPHABET = sorted(byte_level_alphabet())
# Contractions, digits, punctuation, white space, capitals, accents and other scripts.
_TEXT = "Don't WE'LL go: 12345+67 a1b2  x\n\n  y\t$5.00 (ok)!? x/\ny naïve McDONALD 北京"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))


def byte_pairs(*added: str, kind: int = _NORMAL, merges: list[str] | None = None, **settings: object) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary: the 256 bytes, the results of the merges, and the tokens `added`
    with the type `kind`. `settings` are keys below `tokenizer.ggml`.
    """
    merges = merges or ["a b"]
    tokens = [*_ALPHABET, *(merge.replace(" ", "") for merge in merges), *added]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * (len(tokens) - len(added)) + [kind] * len(added),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in settings.items()},
    }


def sentence_pieces(*added: str, kind: int = _NORMAL, **settings: object) -> dict[str, Any]:
    """Return the metadata of a SentencePiece vocabulary with the tokens `added`, from id 264 on."""
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", *all_bytes, *added]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_NORMAL] * 5, *[_BYTE] * 256, *[kind] * len(added)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -1.0, -2.0, *[-9.0] * (256 + len(added))],
        **{f"tokenizer.ggml.{key}": value for key, value in settings.items()},
    }


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(build_tokenizer(metadata)[0]))


def text_pairs() -> dict[str, Any]:
    """Return a vocabulary that merges any two or three bytes which are next to each other in `_TEXT`, so that every
    boundary between words is visible in its tokens.
    """
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    text = "".join(alphabet[byte] for byte in _TEXT.encode())
    found = [(text[i : i + size - 1], text[i + size - 1]) for size in (2, 3) for i in range(len(text) - size + 1)]
    merges = list(dict.fromkeys(" ".join(pair) for pair in found))
    size = len(_ALPHABET) + len(merges)
    return byte_pairs("<s>", "<end>", kind=_CONTROL, merges=merges, bos_token_id=size, eos_token_id=size + 1)


def plain_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """Return the ids of `text` without added tokens, where only the tokens that are part of the text are found."""
    made, _ = build_tokenizer(metadata)
    made["added_tokens"] = [token for token in made["added_tokens"] if not token["special"]]  # type: ignore[attr-defined]
    ids: list[int] = Tokenizer.from_str(json.dumps(made)).encode(text, add_special_tokens=False).ids
    return ids


# Values of `tokenizer.ggml.pre` (empty: no such key), and the tokens of `_TEXT`.
_GPT2 = (
    "331 259 336 6 265 342 25 271 273 275 10 278 280 16 65 17 220 286 363 290 197 3 20 13 296 298 300 378 286 14 "
    "198 88 309 311 390 316 318 320 399 325 327 406"
)
_DEFAULT = (
    "331 6 83 336 6 265 342 25 220 347 275 10 278 280 16 65 17 220 286 363 290 197 3 20 13 296 220 7 300 378 286 "
    "14 198 88 309 311 390 316 318 320 399 325 327 406"
)
_SINGLE_DIGITS = (
    "331 259 336 6 265 342 25 220 16 17 18 19 20 10 21 22 280 16 65 17 220 286 363 290 197 3 20 13 15 15 298 300 "
    "378 286 14 198 88 309 311 390 316 318 320 399 325 327 406"
)
_LLAMA3 = (
    "331 259 336 339 342 25 220 347 275 10 278 280 16 65 17 220 286 288 220 290 197 3 20 13 296 298 300 378 286 "
    "306 88 309 311 390 316 318 320 399 325 327 406"
)
_QWEN2 = (
    "331 259 336 339 342 25 220 16 17 18 19 20 10 21 22 280 16 65 17 220 286 288 220 290 197 3 20 13 15 15 298 "
    "300 378 286 306 88 309 311 390 316 318 320 399 325 327 406"
)
_TEKKEN = (
    "407 331 259 336 339 342 25 220 16 17 18 19 20 10 21 22 280 16 65 17 220 286 288 220 290 197 3 20 13 15 15 "
    "298 300 378 286 306 88 309 311 390 393 319 321 323 325 327 406"
)
_GPT4O = (
    "256 333 261 263 265 342 25 220 347 275 10 278 280 16 65 17 220 286 288 220 290 197 3 20 13 296 298 300 "
    "378 286 306 88 309 311 390 393 319 321 323 325 327 406"
)
_DEEPSEEK_V3 = (
    "331 259 336 339 342 25 220 347 275 10 278 280 16 65 17 220 286 288 220 290 197 3 20 13 296 298 300 378 "
    "286 306 88 309 311 390 316 318 320 399 220 326 328 330"
)
_DEEPSEEK_LLM = (
    "331 6 83 336 6 265 342 25 220 272 349 10 278 280 16 65 17 220 286 198 198 220 290 292 20 13 296 298 300 "
    "378 286 14 198 88 386 312 314 316 318 320 399 220 326 328 330"
)
_DEEPSEEK_CODER = (
    "331 6 83 336 6 265 342 25 220 16 17 18 19 20 10 21 22 280 16 65 17 220 286 198 198 220 290 292 20 13 15 "
    "15 298 300 378 286 14 198 88 309 311 390 316 318 320 399 220 326 328 330"
)
_FALCON = (
    "331 6 83 336 6 265 342 25 220 347 275 10 278 280 16 65 17 220 286 363 290 197 3 20 13 296 220 7 300 378 "
    "286 14 198 88 309 311 390 316 318 320 399 325 327 406"
)
_BLOOM = (
    "256 333 261 263 265 267 269 271 273 275 352 280 357 220 286 363 290 197 293 13 296 298 300 378 381 198 "
    "88 309 311 390 316 318 320 399 325 327 406"
)
_VIKING = (
    "256 333 261 263 265 267 269 220 16 17 18 19 20 10 21 22 280 16 65 17 220 286 363 290 197 3 20 13 15 15 "
    "298 300 378 381 198 88 309 311 390 316 318 320 399 325 327 406"
)
_SEED_CODER = (
    "331 259 336 339 342 25 220 16 17 18 19 20 10 21 22 280 16 65 17 220 286 288 220 290 197 3 20 13 15 15 "
    "298 300 378 286 14 198 88 309 311 390 316 318 320 399 325 327 406"
)
_WORDS = {
    **dict.fromkeys(("", "default"), _DEFAULT),
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
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        f"407 {_LLAMA3}",
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(
        (
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
            "qwen35",
            "bailingmoe",
            "bailingmoe2",
            "llada-moe",
        ),
        _QWEN2,
    ),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": _VIKING,
    "seed-coder": _SEED_CODER,
}


def with_pre(pre: str) -> dict[str, Any]:
    metadata = text_pairs() | {"tokenizer.ggml.pre": pre}
    if not pre:
        del metadata["tokenizer.ggml.pre"]
    return metadata


@pytest.mark.parametrize(("pre", "wanted"), _WORDS.items())
def test_text_is_split_into_words_as_by_llama_cpp(pre: str, wanted: str) -> None:
    assert " ".join(map(str, tokenizer_of(with_pre(pre)).encode(_TEXT).ids)) == wanted


@needs_llama_cpp
@pytest.mark.parametrize(("pre", "wanted"), _WORDS.items())
def test_llama_cpp_splits_text_so(tmp_path: Path, pre: str, wanted: str) -> None:
    (found,) = ask_llama_cpp(write_vocabulary(tmp_path / "file.gguf", with_pre(pre)), [_TEXT])["tokens"]
    assert " ".join(map(str, found)) == wanted


# Vocabularies, a text, and its tokens. In byte_pairs, the bytes have ids 0 to 255, `ab` 256, added tokens follow.
_ADDED = [
    # A whole word is one token even without merges for it, or it is not.
    (byte_pairs("xyz", pre="llama-bpe", add_bos_token=False), "xyz ab", [257, 220, 256]),
    (byte_pairs("xyz", pre="smaug-bpe"), "xyz ab", [87, 88, 89, 220, 256]),
    (byte_pairs("<s>", "<end>", kind=_CONTROL, bos_token_id=257, eos_token_id=258), "ab", [256]),
    (byte_pairs("<s>", "<end>", bos_token_id=257, eos_token_id=258, add_bos_token=True), "ab", [257, 256]),
    (byte_pairs("<s>", "<end>", bos_token_id=257, eos_token_id=258, add_eos_token=True), "ab", [256, 258]),
    (
        byte_pairs("<s>", "<end>", bos_token_id=257, eos_token_id=258, pre="llama-bpe", add_eos_token=True),
        "ab",
        [257, 256, 258],
    ),
    # The separator stands only between two texts.
    (byte_pairs("<s>", "<end>", seperator_token_id=257, add_sep_token=True), "ab", [256]),
    # Byte-level vocabularies have no space before the first word, whatever the file says.
    (byte_pairs(add_space_prefix=True), "ab", [256]),
    # Ids that the file does not name: 11 and 11, or 1 and 2.
    (byte_pairs(add_bos_token=True, add_eos_token=True), "ab", [11, 256, 11]),
    (sentence_pieces(), "ab ab", [1, 7, 7]),
    (sentence_pieces(add_bos_token=False, add_eos_token=True), "ab ab", [7, 7, 2]),
    (sentence_pieces(add_space_prefix=False), "ab ab", [1, 6, 7]),
    (sentence_pieces("<x>", kind=_CONTROL, add_eos_token=True), "ab<x>ab", [1, 7, 264, 7, 2]),
    (sentence_pieces("<x>", kind=_CONTROL, bos_token_id=264, eos_token_id=1, add_eos_token=True), "ab", [264, 7, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "text", "wanted"), _ADDED)
def test_tokens_are_added_as_by_llama_cpp(metadata: dict[str, Any], text: str, wanted: list[int]) -> None:
    assert tokenizer_of(metadata).encode(text).ids == wanted


@needs_llama_cpp
@pytest.mark.parametrize(("metadata", "text", "wanted"), _ADDED)
def test_llama_cpp_adds_these_tokens(tmp_path: Path, metadata: dict[str, Any], text: str, wanted: list[int]) -> None:
    assert ask_llama_cpp(write_vocabulary(tmp_path / "file.gguf", metadata), [text])["tokens"] == [wanted]


def test_a_pair_of_texts_has_the_end_token_twice_and_the_separator_once() -> None:
    """As in the reranking prompts of llama.cpp's server."""
    ids: dict[str, Any] = {"bos_token_id": 257, "eos_token_id": 258, "seperator_token_id": 259}
    metadata = byte_pairs("<s>", "<end>", "<sep>", **ids, add_bos_token=True, add_eos_token=True, add_sep_token=True)
    assert tokenizer_of(metadata).encode("ab", "a").ids == [257, 256, 258, 259, 64, 258]


def test_a_token_to_add_that_the_file_does_not_name_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"add_sep_token is true, but the file lacks .*\.seperator_token_id"):
        build_tokenizer(byte_pairs(add_sep_token=True))


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="GGUF tokenizer 't5' is not supported"):
        build_tokenizer(byte_pairs() | {"tokenizer.ggml.model": "t5"})


_OTHER_ENDS = sorted(END_TEXTS - {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "</s>"})
_FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
# Vocabularies, and for each added token: E for a control token that ends an output, e for ordinary text that ends it
# because a key names its id, C for another control token, T for a user-defined token, and - for ordinary text. Ids of
# other tokens that end an output are listed separately.
_ENDS: list[tuple[dict[str, Any], str, list[int]]] = [
    (byte_pairs(*_OTHER_ENDS, eos_token_id=256), "E" * len(_OTHER_ENDS), [256]),
    (byte_pairs(*_OTHER_ENDS, kind=_USER_DEFINED, eos_token_id=256), "E" * len(_OTHER_ENDS), [256]),
    (byte_pairs("<|end|>", "<|return|>", "<|call|>", kind=_CONTROL, eos_token_id=258), "TEE", []),
    (byte_pairs("<|end|>", "<|calls|>", "<|flush|>", eos_token_id=256), "TEE", [256]),
    (byte_pairs("<|end|>", "<|return|>", "<|flush|>", eos_token_id=256), "EEE", [256]),
    (byte_pairs("</s>", "<|tool_response>", eos_token_id=256), "-E", [256]),
    (byte_pairs("</s>", "<|plamo:eos|>", eos_token_id=258), "-e", []),
    (byte_pairs("</s>", "<|plamo:eos|>", eos_token_id=256), "E-", [256]),
    (byte_pairs(*_FILL_IN, eos_token_id=256), "CCCEEE", [256]),
    (byte_pairs("<x>", *_FILL_IN, eos_token_id=256, fim_pad_token_id=257, suffix_token_id=257), "eC-C-EE", [256]),
    (byte_pairs("<|channel|>", "<|message|>", "<|x|>", kind=_CONTROL, eos_token_id=256), "TTC", [256]),
    (byte_pairs("<a>", "<b>", "<c>", kind=_CONTROL, eos_token_id=257, eot_token_id=258, eom_token_id=259), "EEE", []),
    (byte_pairs("<a>", kind=_USER_DEFINED), "T", [11]),
    (sentence_pieces("<a>", kind=_CONTROL), "C", [2]),
    (sentence_pieces("<end_of_turn>", "<a>", eos_token_id=265), "Ee", [2]),
]


def check_ends(
    metadata: dict[str, Any], kinds: str, others: list[int], ends: list[int], special: list[int], plain: list[int]
) -> None:
    """Check the ids that end an output, those found in the text of all added tokens, and those found in it as text."""
    first = len(metadata["tokenizer.ggml.tokens"]) - len(kinds)
    ids = dict(enumerate(kinds, first))
    assert sorted(ends) == sorted([*others, *(token_id for token_id, kind in ids.items() if kind in "Ee")])
    marked = [token_id for token_id, kind in ids.items() if kind in "CTE"]
    assert [token_id for token_id in special if token_id in marked] == marked
    assert [token_id for token_id in plain if token_id in ids] == [i for i, kind in ids.items() if kind == "T"]


def text_of_added(metadata: dict[str, Any], kinds: str) -> str:
    return "a".join(metadata["tokenizer.ggml.tokens"][-len(kinds) :])


@pytest.mark.parametrize(("metadata", "kinds", "others"), _ENDS)
def test_outputs_end_at_the_tokens_at_which_llama_cpp_ends_them(
    tmp_path: Path, metadata: dict[str, Any], kinds: str, others: list[int]
) -> None:
    model = open_model_folder(str(write_vocabulary(tmp_path / "file.gguf", metadata)))
    text = text_of_added(metadata, kinds)
    special = tokenizer_of(metadata).encode(text).ids
    check_ends(metadata, kinds, others, list(model.end_ids), special, plain_ids(metadata, text))


@needs_llama_cpp
@pytest.mark.parametrize(("metadata", "kinds", "others"), _ENDS)
def test_llama_cpp_ends_outputs_there(tmp_path: Path, metadata: dict[str, Any], kinds: str, others: list[int]) -> None:
    file = write_vocabulary(tmp_path / "file.gguf", metadata)
    found = ask_llama_cpp(file, [text_of_added(metadata, kinds)])
    check_ends(metadata, kinds, others, found["ends"], found["tokens"][0], found["plain"][0])


def test_default_ids_of_ordinary_tokens_do_not_become_special(tmp_path: Path) -> None:
    """The default end token of a byte-level vocabulary is usually a punctuation mark."""
    model = open_model_folder(str(write_vocabulary(tmp_path / "file.gguf", byte_pairs())))
    assert (model.end_ids, dict(model.special_tokens)) == ((11,), {})


def test_ids_that_the_file_names_come_first(tmp_path: Path) -> None:
    metadata = byte_pairs("<|im_end|>", "<b>", "<c>", kind=_CONTROL, eos_token_id=259, eot_token_id=258)
    assert open_model_folder(str(write_vocabulary(tmp_path / "file.gguf", metadata))).end_ids == (259, 258, 257)


def test_an_id_outside_the_vocabulary_is_reported() -> None:
    with pytest.raises(ConfigError, match="special token id 999 lies outside the vocabulary of 257"):
        build_tokenizer(byte_pairs(eot_token_id=999))
