"""Incremental decoding gives the same text as the tokenizer, however the tokens are split into batches."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from midstream.text.incremental import DecoderFactory, StepFactory, decoder_factory

WORDS = ("the", "▁the", "▁", "a", "é", "日", "▁▁", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_model_folder("smollm2").path)


@pytest.fixture(scope="module")
def factory(tokenizer: Tokenizer) -> DecoderFactory:
    return decoder_factory(tokenizer)


def sentence_piece_folder(folder: Path, *, strip: bool) -> Path:
    decoders: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special = [
        {"id": WORDS.index(word), "content": word, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for word in ("<s>", "</s>")
    ]  # fmt: skip
    spec: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(WORDS)}, "merges": [],
                  "byte_fallback": True, "unk_token": None},
    }  # fmt: skip
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["strip", "keep"])
def sentence_piece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(sentence_piece_folder(tmp_path_factory.mktemp("spm") / "model", strip=request.param))


def in_chunks(factory: DecoderFactory, ids: list[int], cuts: list[int], *, skip: bool) -> list[str]:
    decoder = factory.open(skip_special_tokens=skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    texts = [decoder.decode(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*texts, decoder.finish()]


TEXTS = st.text(max_size=40) | st.sampled_from(
    ["a 👩‍👩‍👧‍👦 family", "日本語のテキスト", "naïve café\n\n", "🇩🇪🏳️‍🌈", "\ufffd", "<|im_end|> x"]
)
CUTS = st.lists(st.integers(0, 80), max_size=8)


@given(text=TEXTS, cuts=CUTS, skip=st.booleans())
def test_text_survives_any_cutting(
    tokenizer: Tokenizer, factory: DecoderFactory, text: str, cuts: list[int], skip: bool
) -> None:
    ids = tokenizer.encode(text)
    assert "".join(in_chunks(factory, ids, cuts, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 600) | st.integers(0, 49_200), max_size=40), cuts=CUTS, skip=st.booleans())
def test_any_tokens_survive_any_cutting(
    tokenizer: Tokenizer, factory: DecoderFactory, ids: list[int], cuts: list[int], skip: bool
) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(in_chunks(factory, ids, cuts, skip=skip)) == whole
    # The text that is final after k tokens does not depend on how the tokens are split into batches.
    one_by_one = in_chunks(factory, ids, list(range(len(ids))), skip=skip)
    k = min([*cuts, len(ids)])
    decoder = factory.open(skip_special_tokens=skip)
    assert decoder.decode(ids[:k]) == "".join(one_by_one[: k + 1])


def test_an_emoji_cut_across_tokens_appears_whole(tokenizer: Tokenizer, factory: DecoderFactory) -> None:
    ids = tokenizer.encode("🫠")  # a character of four bytes
    assert len(ids) > 1
    decoder = factory.open(skip_special_tokens=True)
    assert [decoder.decode([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🫠"]
    assert decoder.finish() == ""


def test_an_unfinished_character_ends_as_replacement(tokenizer: Tokenizer, factory: DecoderFactory) -> None:
    ids = tokenizer.encode("🫠")[:-1]
    decoder = factory.open(skip_special_tokens=True)
    assert decoder.decode(ids) == ""
    assert decoder.finish() == "\ufffd" == tokenizer.decode(ids)


@given(data=st.data(), skip=st.booleans())
def test_sentence_piece_text_survives_any_cutting(sentence_piece: Tokenizer, data: st.DataObject, skip: bool) -> None:
    hello = [WORDS.index(f"<0x{byte:02X}>") for byte in "日é🫠".encode()]
    pieces = st.lists(st.integers(0, len(WORDS) + 2).map(lambda i: [i]) | st.just(hello), max_size=20)
    ids = [token_id for piece in data.draw(pieces) for token_id in piece]
    texts = in_chunks(decoder_factory(sentence_piece), ids, data.draw(CUTS), skip=skip)
    assert "".join(texts) == sentence_piece.decode(ids, skip_special_tokens=skip)


def test_cost_per_token_is_constant(tokenizer: Tokenizer, factory: DecoderFactory) -> None:
    # Bytes that never form a character are the worst case for decoders that wait for a complete character.
    broken = next(i for i in range(600) if tokenizer.decode([i]) == "\ufffd")
    part, num_parts = 2_000, 20

    def ratio() -> float:
        decoder = factory.open(skip_special_tokens=True)
        times = []
        for _ in range(num_parts):
            start = time.thread_time()
            for _ in range(part):
                decoder.decode((broken,))
            times.append(time.thread_time() - start)
        return min(times[-4:]) / min(times[:4])

    # If the cost per token grew with the length of the text, the last parts would cost at least 17/4 times as much as
    # the first parts.
    assert min(ratio() for _ in range(3)) < 2


OTHER_WORDS = (
    "the", "▁the", "##ing", "er</w>", "é", ".", "n", "'", "t", " ", "日</w>", "<s>", *"ĠæĹ¥", "n't", "  x", "xx", "xyx",
    "▁a▁", "|", "<pad>", "", *(f"<0x{byte:02X}>" for byte in b"A\xe6\x97\xa5\xf0"),
)  # fmt: skip
REPLACED = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
FUSE, BYTES = {"type": "Fuse"}, {"type": "ByteFallback"}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


DECODERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "word piece": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "metaspace": METASPACE,
    "suffixes": {"type": "BPEDecoder", "suffix": "</w>"},
    "bytes and more": sequence(BYTE_LEVEL, {**REPLACED, "pattern": {"String": "x"}}),
    "bytes first": sequence(BYTES, REPLACED, FUSE),
    "bytes last": sequence(FUSE, REPLACED, BYTES),
}
STEPS = st.one_of(
    st.builds(
        lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content},
        st.sampled_from([{"String": text} for text in ("▁", "x", "xx", "xyx", "the", "")] + [{"Regex": "x+|^ "}]),
        st.sampled_from(["", " ", "xx"]),
    ),
    st.booleans().map(lambda cleanup: {"type": "WordPiece", "prefix": "##", "cleanup": cleanup}),
    st.sampled_from(["always", "first", "never"]).map(lambda scheme: {**METASPACE, "prepend_scheme": scheme}),
    st.sampled_from(["</w>", "x"]).map(lambda suffix: {"type": "BPEDecoder", "suffix": suffix}),
    st.booleans().map(
        lambda cleanup: {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": cleanup}
    ),
    st.sampled_from([FUSE, BYTES, BYTE_LEVEL]),
    st.builds(
        lambda character, start: {"type": "Strip", "content": character, "start": start, "stop": 0},
        st.sampled_from(" x"),
        st.integers(0, 2),
    ),
)


def other_tokenizer(folder: Path, decoder: dict[str, Any] | None) -> Tokenizer:
    """Return a tokenizer whose decoder has no table of its own."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(OTHER_WORDS)}, unk_token="the"))
    tokenizer.add_special_tokens(["<s>"])
    spec = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"decoder": decoder}))
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=DECODERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return other_tokenizer(tmp_path_factory.mktemp("other"), DECODERS[request.param])


OTHER_IDS = st.lists(st.integers(0, len(OTHER_WORDS) + 1), max_size=30)


@given(ids=OTHER_IDS, cuts=CUTS, skip=st.booleans())
def test_other_decoders_survive_any_cutting(other: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert "".join(in_chunks(decoder_factory(other), ids, cuts, skip=skip)) == other.decode(
        ids, skip_special_tokens=skip
    )


class _AnyDecoder:
    """The part of a tokenizer that decoders use, without the checks of a file that are made in another process."""

    def __init__(self, decoder: dict[str, Any]) -> None:
        words = {word: i for i, word in enumerate(OTHER_WORDS)}
        spec = json.loads(tokenizers.Tokenizer(models.WordLevel(words, unk_token="the")).to_str())
        self.library = tokenizers.Tokenizer.from_str(json.dumps(spec | {"decoder": decoder}))
        self.decoder, self.special_ids = decoder, frozenset[int]()
        self.token = self.library.id_to_token


@given(steps=st.lists(STEPS, min_size=1, max_size=4), ids=OTHER_IDS, cuts=CUTS)
def test_steps_in_any_order_give_the_text_of_the_library(
    steps: list[dict[str, Any]], ids: list[int], cuts: list[int]
) -> None:
    tokenizer = _AnyDecoder(sequence(*steps))
    chunks = in_chunks(StepFactory(cast("Tokenizer", tokenizer)), ids, cuts, skip=True)
    assert "".join(chunks) == tokenizer.library.decode(ids)


@pytest.mark.parametrize("number", [31, 32, 33, 100])
def test_a_run_of_bytes_without_a_character_is_not_repeated(tmp_path: Path, number: int) -> None:
    tokenizer = other_tokenizer(tmp_path, DECODERS["bytes first"])
    ids = [0, *[OTHER_WORDS.index("<0xF0>")] * number, 0]
    chunks = in_chunks(decoder_factory(tokenizer), ids, list(range(len(ids))), skip=True)
    assert "".join(chunks) == "the" + "\ufffd" * number + "the" == tokenizer.decode(ids)


def test_text_is_sent_as_soon_as_it_is_final(tmp_path: Path) -> None:
    def chunks(decoder: str, words: list[str]) -> list[str]:
        state = decoder_factory(other_tokenizer(tmp_path, DECODERS[decoder])).open(skip_special_tokens=True)
        return [*(state.decode((OTHER_WORDS.index(word),)) for word in words), state.finish()]

    assert chunks("word piece", ["the", "##ing", "."]) == ["the", "ing", " .", ""]
    assert chunks("suffixes", ["er</w>", "t", "er</w>"]) == ["", "er ", "t", "er"]
    assert chunks("bytes and more", ["æ", "Ĺ", "¥", "x" * 2]) == ["", "", "日", "  ", ""]
    assert chunks("bytes first", ["▁the", "<0xE6>", "<0x97>", "<0xA5>", "n"]) == [" the", "", "", "", "日n", ""]


@pytest.mark.parametrize("skipped", [OTHER_WORDS.index("<s>"), len(OTHER_WORDS)], ids=["special", "unknown"])
@pytest.mark.parametrize("number", [1, 31, 32, 100])
def test_any_number_of_tokens_without_text_leaves_the_next_words_apart(
    tmp_path: Path, number: int, skipped: int
) -> None:
    tokenizer = other_tokenizer(tmp_path, DECODERS["word piece"])
    ids = [0, *[skipped] * number, 0]
    assert "".join(in_chunks(decoder_factory(tokenizer), ids, list(range(number)), skip=True)) == "the the"
    assert tokenizer.decode(ids) == "the the"


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {"a": 0, "b": 1, "Ġc": 900}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<s>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()) | {"decoder": decoder}))
    found = Tokenizer(tmp_path)
    assert "".join(in_chunks(decoder_factory(found), [0, 500, 900], [1], skip=True)) == "a c" == found.decode([0, 900])
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text().replace("900", "4000000000"))
    with pytest.raises(ConfigError, match="token id 4000000000"):
        Tokenizer(tmp_path)


def test_text_of_words_without_a_decoder_by_hand(tmp_path: Path) -> None:
    decoder = decoder_factory(other_tokenizer(tmp_path, None)).open(skip_special_tokens=True)
    assert [decoder.decode((token_id,)) for token_id in (0, 11, 5, 6)] == ["the", "", " .", " n"]
    assert decoder.finish() == ""


def test_bytes_that_form_no_character_are_not_held_forever(tmp_path: Path) -> None:
    factory = decoder_factory(other_tokenizer(tmp_path, DECODERS["bytes and more"]))
    ids, decoder = [OTHER_WORDS.index("æ")] * 100, factory.open(skip_special_tokens=True)
    text = "".join(decoder.decode((token_id,)) for token_id in ids)
    assert text
    assert text + decoder.finish() == "\ufffd" * 100


def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
