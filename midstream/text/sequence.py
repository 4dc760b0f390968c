"""The text of one sequence as a pure function of its tokens: E(k) is the text that is final after k tokens.

Incomplete characters, possible beginnings of stop words, and the text of a last token that may turn out to be the end
or stop token are held back. The chunk for tokens [a, b) carries E(b) - E(a), however the tokens arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from midstream.text.incremental import DecoderFactory, TextDecoder
from midstream.text.stop_words import StopWords, StopWordScanner, stop_words


@dataclass(frozen=True, slots=True)
class TextRules:
    """Options for turning a request's tokens into text.

    Attributes:
        stop_ids: Tokens that end a sequence, including the model's end ids.
        min_tokens: A stop word can end the sequence only once the output has at least this many tokens.
        include_stop: Whether the text includes the stop word or stop token.
        prompt_ids: Tokens of the prompt, if the output begins with it.
    """

    stop_words: StopWords | None = None
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    prompt_ids: tuple[int, ...] = ()

    @staticmethod
    def words(words: Sequence[str]) -> StopWords | None:
        """Return the automaton for the stop words; None if there are none."""
        return stop_words(tuple(words)) if words else None


class SequenceText:
    """Text state of one sequence.

    Attributes:
        stop_at: Number of tokens up to the one that completed a stop word; None before that.
        prompt_text: Final text of the prompt; the caller delivers it first.
    """

    __slots__ = ("_decoder", "_held", "_rules", "_scanner", "num_tokens", "prompt_text", "stop_at")

    def __init__(self, rules: TextRules, decoders: DecoderFactory) -> None:
        self._rules = rules
        self._decoder: TextDecoder | None = None
        self._scanner: StopWordScanner | None = None
        if rules.detokenize or rules.stop_words:
            self._decoder = decoders.open(skip_special_tokens=rules.skip_special_tokens)
        if rules.stop_words:
            self._scanner = StopWordScanner(rules.stop_words, keep_match=rules.include_stop)
        self._held: int | None = None  # the last token, if it may turn out to be the end or stop token
        self.num_tokens = 0
        self.stop_at: int | None = None
        self.prompt_text = self._shown(self._decoder.decode(rules.prompt_ids) if self._decoder else "")

    @property
    def stop_word(self) -> str | None:
        """The stop word that was found, or None."""
        return self._scanner.match if self._scanner else None

    def copy(self) -> SequenceText:
        """Return an independent copy in the same state."""
        other = copy(self)
        other._decoder = self._decoder.copy() if self._decoder else None
        other._scanner = copy(self._scanner)
        return other

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next tokens, and return the text that becomes final.

        When they complete a stop word, `stop_at` is set, and later tokens are ignored.

        Precondition: `stop_at` is None and `token_ids` is not empty.
        """
        self.num_tokens += len(token_ids)
        if self._decoder is None:
            return ""
        if self._held is not None:
            token_ids = [self._held, *token_ids]
            self._held = None
        if not self._rules.include_stop and token_ids[-1] in self._rules.stop_ids:
            self._held = token_ids[-1]
            token_ids = token_ids[:-1]
        if self._scanner is None:
            return self._shown(self._decoder.decode(token_ids))
        last = self.num_tokens - (self._held is not None)
        return self._shown(self._scan(token_ids, last - len(token_ids), self._decoder, self._scanner))

    def finish(self, *, ends_with_stop_token: bool) -> str:
        """Return the remaining text of an ended sequence; pending tokens may still complete a stop word."""
        if self._decoder is None or self.stop_at is not None:
            return ""
        text = ""
        if self._held is not None and not ends_with_stop_token:
            held, self._held = self._held, None
            if self._scanner is None:
                text = self._decoder.decode((held,))
            else:
                text = self._scan((held,), self.num_tokens - 1, self._decoder, self._scanner)
                if self.stop_at is not None:
                    return self._shown(text)
        return self._shown(text + self._finish(self._decoder))

    def _finish(self, decoder: TextDecoder) -> str:
        """Return the text that the decoder and the scanner hold back; a stop word in it ends at the last token."""
        rest, scanner = decoder.finish(), self._scanner
        if scanner is None:
            return rest
        # Without an output token, the text belongs to the prompt.
        text = scanner.scan(rest, can_stop=self.num_tokens >= max(self._rules.min_tokens, 1))
        if scanner.match is None:
            return text + scanner.finish()
        self.stop_at = self.num_tokens
        return text

    def _scan(self, token_ids: Sequence[int], before: int, decoder: TextDecoder, scanner: StopWordScanner) -> str:
        """Find the token that completes a match by scanning token by token; `before` tokens were processed earlier."""
        parts: list[str] = []
        for count, token_id in enumerate(token_ids, before + 1):
            parts.append(scanner.scan(decoder.decode((token_id,)), can_stop=count >= self._rules.min_tokens))
            if scanner.match is not None:
                self.stop_at = count
                self._held = None
                break
        return "".join(parts)

    def _shown(self, text: str) -> str:
        return text if self._rules.detokenize else ""
