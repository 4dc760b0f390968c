"""The bytes of single tokens, which concatenate to the bytes of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from midstream.model.tokenizer import Tokenizer


def saved(folder: Path, vocab: dict[str, int], decoder: decoders.Decoder) -> Tokenizer:
    library = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    library.decoder = decoder
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Metaspace(),
    ],
    ids=["Llama 2", "T5"],
)
def test_a_word_with_a_space_before_it_is_not_the_word_without(tmp_path: Path, decoder: decoders.Decoder) -> None:
    tokenizer = saved(tmp_path, {"▁the": 0, "the": 1, "<0x0A>": 2}, decoder)
    assert tokenizer.token_bytes(0) == b" the"
    assert tokenizer.token_bytes(1) == b"the"


def test_parts_of_a_character_have_their_bytes(tmp_path: Path) -> None:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = saved(tmp_path, letters, decoders.ByteLevel())
    ids = [letters[item] for item in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0]]
    assert b"".join(map(tokenizer.token_bytes, ids)) == "😀".encode()
    (tmp_path / "fallback").mkdir()
    fallback = saved(tmp_path / "fallback", {"<0xF0>": 0, "a": 1}, decoders.ByteFallback())
    assert [fallback.token_bytes(0), fallback.token_bytes(1)] == [b"\xf0", b"a"]
