"""A straightforward beam search over the fake model, used as the reference for the scheduler's beam search."""

from __future__ import annotations

from functools import lru_cache

from scheduler.core.request_spec import RequestSpec
from tests.fakes.model import candidates, text_of


def best_beams(spec: RequestSpec, vocab_size: int) -> list[tuple[list[int], float]]:
    """Return the tokens and scores of the returned beams, best first."""
    return _search(
        spec.prompt[-1],
        spec.beam_width,
        spec.max_tokens,
        spec.stop_token_ids,
        spec.length_penalty,
        spec.beam_diversity_rate,
        spec.early_stopping,
        spec.stop_words,
        spec.min_tokens,
        vocab_size,
    )[: spec.num_sequences]


@lru_cache
def _search(
    last: int,
    width: int,
    limit: int,
    stops: frozenset[int],
    penalty: float,
    rate: float,
    stopping: int,
    words: tuple[str, ...],
    min_tokens: int,
    vocab: int,
) -> list[tuple[list[int], float]]:
    num_considered = max(2, 1 + len(stops)) * width
    count = num_considered if words else width + len(stops)
    running: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    while True:
        found = []
        for rank, (tokens, total) in enumerate(running):
            for token, log_prob in candidates(tokens[-1] if tokens else last, count, stops, vocab):
                found.append((-(total + log_prob + rate * rank), rank, token, total + log_prob))
        found.sort()
        length = len(running[0][0]) + 1
        going = []
        for place, (negative, rank, token, total) in enumerate(found[:num_considered]):
            tokens = [*running[rank][0], token]
            text = "".join(map(text_of, tokens))
            has_word = length >= min_tokens and any(word in text for word in words)
            if (token in stops and length >= min_tokens) or has_word or (length == limit and not rate):
                if place < width:
                    ended.append((tokens, -negative / length**penalty))
            else:
                going.append((tokens, total))
        running = going[:width]
        ended = _best(ended, width)
        assumed = limit if stopping > 1 and penalty > 0 else length
        attainable = -found[0][0] if rate or not running else running[0][1]
        is_full = len(ended) == width
        if not running or (is_full and (stopping == 1 or attainable / assumed**penalty <= ended[-1][1])):
            return ended
        if length == limit:
            return _best([*ended, *((tokens, total / length**penalty) for tokens, total in running)], width)


def _best(beams: list[tuple[list[int], float]], width: int) -> list[tuple[list[int], float]]:
    return sorted(beams, key=lambda beam: -beam[1])[:width]
