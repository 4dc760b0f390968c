"""Libraries that restrict an output to a JSON schema, each with the same interface; all write `json.dumps`'s format."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from midstream.grammar.compile import GuideError, GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.messages import Guide
from midstream.model.folder import open_model_folder

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Walks end soon if tokens that may close a value are preferred.
_CLOSING = ('"', "}", "]", '"}', '"]', "}}", '",', "0", "1")
Tokens = npt.NDArray[np.intp]


class Walk(Protocol):
    """One output, which has just begun."""

    def allowed(self) -> tuple[Tokens, bool]:
        """Return the tokens that may follow, other than end tokens, and whether the output may end."""

    def add(self, token: int) -> None:
        """Add a token."""


class Engine(Protocol):
    """One library."""

    @property
    def texts(self) -> Sequence[bytes]:
        """The bytes of each token."""

    def compile(self, schema: str) -> Callable[[], Walk]:
        """Return a function that begins an output. Raises ValueError, with the reason, if the schema is refused."""


class _MatcherWalk:
    def __init__(self, matcher: llguidance.LLMatcher, end_ids: Sequence[int]) -> None:
        self._matcher, self._end_ids = matcher.deep_copy(), end_ids

    def allowed(self) -> tuple[Tokens, bool]:
        if self._matcher.is_stopped():
            return np.array([], dtype=np.intp), self._matcher.is_accepting() or not self._matcher.is_error()
        return _tokens(self._matcher.compute_bitmask(), self._end_ids), self._matcher.is_accepting()

    def add(self, token: int) -> None:
        self._matcher.consume_token(token)


class _OnLibrary:
    def __init__(self, tokenizer: GuideTokenizer | None = None) -> None:
        self.tokenizer = tokenizer or smollm2_tokenizer()
        self.texts = _texts(self.tokenizer)

    def matcher(self, schema: str) -> llguidance.LLMatcher:
        raise NotImplementedError

    def compile(self, schema: str) -> Callable[[], Walk]:
        matcher = self.matcher(schema)
        return lambda: _MatcherWalk(matcher, self.tokenizer.library.eos_tokens)


class Midstream(_OnLibrary):
    """Our own conversion of schemas."""

    def matcher(self, schema: str) -> llguidance.LLMatcher:
        try:
            return compile_guide(Guide("json_schema", schema), self.tokenizer)
        except GuideError as error:
            raise ValueError(str(error)) from None


class LLGuidance(_OnLibrary):
    """llguidance's own conversion of schemas."""

    def matcher(self, schema: str) -> llguidance.LLMatcher:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=STYLE)
        matcher = llguidance.LLMatcher(self.tokenizer.library, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class XGrammar:
    """XGrammar, whose schemas leave keywords out that it does not enforce."""

    def __init__(self) -> None:
        import xgrammar  # type: ignore[import-not-found, unused-ignore]

        tokenizer = smollm2_tokenizer()
        self.texts, self._end_ids = _texts(tokenizer), list(tokenizer.library.eos_tokens)
        info = xgrammar.TokenizerInfo(list(self.texts), vocab_type=xgrammar.VocabType.RAW, stop_token_ids=self._end_ids)
        self._size, self._xgrammar = info.vocab_size, xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Callable[[], Walk]:
        try:
            compiled = self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(", ", ": "))
        except Exception as error:  # noqa: BLE001 (its errors have no common class)
            raise ValueError(str(error)) from None
        return lambda: _XGrammarWalk(self._xgrammar, compiled, self._size, self._end_ids)


class _XGrammarWalk:
    def __init__(self, xgrammar: Any, compiled: Any, size: int, end_ids: Sequence[int]) -> None:
        self._matcher, self._end_ids = xgrammar.GrammarMatcher(compiled), end_ids
        self._mask = xgrammar.allocate_token_bitmask(1, size)

    def allowed(self) -> tuple[Tokens, bool]:
        self._matcher.fill_next_token_bitmask(self._mask)
        bits = self._mask.numpy().tobytes()
        return _tokens(bits, self._end_ids), any(bits[token // 8] >> token % 8 & 1 for token in self._end_ids)

    def add(self, token: int) -> None:
        self._matcher.accept_token(token)


class OutlinesCore:
    """outlines-core, which makes a regular expression of a schema; its tokens are single bytes, since its automata take
    long to make for a whole vocabulary.
    """

    def __init__(self) -> None:
        import outlines_core  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._core = outlines_core
        self.texts = [bytes([byte]) for byte in range(128)]
        self._vocabulary = outlines_core.Vocabulary(128, {chr(byte): [byte] for byte in range(1, 128)})

    def compile(self, schema: str) -> Callable[[], Walk]:
        try:
            expression = self._core.json_schema.build_regex_from_schema(schema, " ?")
            index = self._core.Index(expression, self._vocabulary)
        except Exception as error:  # noqa: BLE001 (its errors have no common class)
            raise ValueError(str(error)) from None
        return lambda: _OutlinesWalk(self._core.Guide(index))


class _OutlinesWalk:
    def __init__(self, guide: Any) -> None:
        self._guide = guide

    def allowed(self) -> tuple[Tokens, bool]:
        tokens = self._guide.get_tokens()
        return np.array(
            [token for token in tokens if token < 128], dtype=np.intp
        ), self._guide.is_finished() or 128 in tokens

    def add(self, token: int) -> None:
        self._guide.advance(token)


ENGINES: dict[str, Callable[[], Engine]] = {
    "Midstream": Midstream,
    "llguidance": LLGuidance,
    "XGrammar": XGrammar,
    "outlines-core": OutlinesCore,
}


def walk(engine: Engine, begin: Callable[[], Walk], draw: random.Random, max_tokens: int) -> str | None:
    """Return a random output; None if it does not end within `max_tokens`. Raises ValueError at a dead end."""
    output, tokens = begin(), list[int]()
    wanted = {text.encode() for text in _CLOSING}
    closing = [token for token, text in enumerate(engine.texts) if text in wanted]
    while True:
        allowed, may_end = output.allowed()
        if may_end and (not len(allowed) or draw.random() < 0.5):
            return b"".join(engine.texts[token] for token in tokens).decode("utf-8", "replace")
        if not len(allowed):
            raise ValueError("a dead end")
        if len(tokens) == max_tokens:
            return None
        preferred = np.intersect1d(allowed, closing, assume_unique=True)
        tokens.append(int(draw.choice(preferred if len(preferred) and draw.random() < 0.7 else allowed)))
        output.add(tokens[-1])


def smollm2_tokenizer() -> GuideTokenizer:
    """Return the tokenizer of the model that comes with the package."""
    folder = open_model_folder("smollm2")
    return load_tokenizer(folder.path / "tokenizer.json", folder.vocab_size, list(folder.end_ids))


def _texts(tokenizer: GuideTokenizer) -> list[bytes]:
    library = tokenizer.library
    return [library.decode_bytes([token]) for token in range(library.vocab_size)]


def _tokens(mask: bytes, end_ids: Sequence[int]) -> Tokens:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    bits[list(end_ids)] = 0
    return np.flatnonzero(bits)
