"""Stop words, compared with a naive search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midstream.text.stop_words import StopWords, StopWordScanner, stop_words


def naive(text: str, words: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text before the match that ends first, and the matched word; of several such words, the longest."""
    for end in range(1, len(text) + 1):
        matches = [word for word in words if text[:end].endswith(word)]
        if matches:
            word = max(matches, key=len)
            return text[: end - len(word)], word
    return text, None


def scan(pieces: list[str], words: tuple[str, ...], *, keep: bool = False) -> tuple[list[str], str | None]:
    scanner = StopWordScanner(stop_words(words), keep_match=keep)
    shown = []
    for piece in pieces:
        shown.append(scanner.scan(piece))
        if scanner.match is not None:
            return shown, scanner.match
    return [*shown, scanner.finish()], None


LETTERS = st.text(alphabet="ab日", max_size=12)
WORDS = st.lists(st.text(alphabet="ab日", min_size=1, max_size=4), min_size=1, max_size=4, unique=True).map(tuple)


@given(pieces=st.lists(LETTERS, max_size=6), words=WORDS, keep=st.booleans())
def test_it_finds_the_same_as_a_search_of_the_whole_text(pieces: list[str], words: tuple[str, ...], keep: bool) -> None:
    before, word = naive("".join(pieces), words)
    shown, match = scan(pieces, words, keep=keep)
    assert match == word
    assert "".join(shown) == (before + word if keep and word else before)


@given(pieces=st.lists(LETTERS, max_size=6), words=WORDS)
def test_it_holds_back_only_the_longest_possible_beginning(pieces: list[str], words: tuple[str, ...]) -> None:
    scanner = StopWordScanner(stop_words(words), keep_match=False)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += scanner.scan(piece)
        if scanner.match is not None:
            return
        beginnings = [n for n in range(len(text) + 1) if any(w.startswith(text[n:]) and w != text[n:] for w in words)]
        assert shown == text[: min(beginnings)]


def test_by_hand() -> None:
    assert scan(["He", "llo\n", "\nUs", "er: hi"], ("\n\nUser:",)) == (["He", "llo", "", ""], "\n\nUser:")
    assert scan(["ab", "c"], ("abd",)) == (["", "abc", ""], None)
    assert scan(["ab"], ("abd",)) == (["", "ab"], None)
    assert scan(["xabcd"], ("abcd", "bc")) == (["xa"], "bc")  # the match that ends first
    assert scan(["xabc"], ("bc", "abc")) == (["x"], "abc")  # the longest of the matches that end first
    assert scan(["xa", "bc"], ("ab",), keep=True) == (["x", "ab"], "ab")


def test_a_match_is_text_while_stopping_is_not_allowed() -> None:
    scanner = StopWordScanner(stop_words(("END",)), keep_match=False)
    assert scanner.scan("an END", can_stop=False) == "an END"
    assert scanner.scan(" here EN", can_stop=False) == " here "
    assert scanner.scan("D now") == ""
    assert scanner.match == "END"


@given(words=WORDS)
def test_the_automaton_is_shared(words: tuple[str, ...]) -> None:
    assert stop_words(words) is stop_words(words)


def test_the_text_alone_determines_which_nodes_are_created() -> None:
    words = StopWords(("abcdef", "bcd", "z" * 250))
    scanner = StopWordScanner(words, keep_match=False)
    assert scanner.scan("text ab") == "text "
    nodes, reached = [words.root], []
    for node in nodes:
        reached.append(node.words[0][: node.depth])
        nodes += [child for child in node.children.values() if child is not None]
    assert reached == ["", "a", "b", "ab"]
