"""The output of one request for one router: repeated tokens are delivered only once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from detokenizer import streams
from detokenizer.feed_messages import Opened, SequenceEnd
from detokenizer.streams import OutputStream, RouterConnection
from midstream.chunk import FinishReason, Usage
from midstream.extras import Extras, LogProbs, Tensor
from midstream.model.tokenizer import Tokenizer
from midstream.text.incremental import ByteFallbackFactory, DecoderFactory
from midstream.text.sequence import TextRules


class Feed:
    """A stand-in for a feed that records the stops that are sent."""

    def __init__(self) -> None:
        self.stops: list[tuple[int, int, str]] = []

    def send_stop(self, stream: OutputStream, sequence_index: int, num_tokens: int, stop_word: str) -> None:
        """Record a stop."""
        self.stops.append((sequence_index, num_tokens, stop_word))


ROUTER = RouterConnection(lambda: None, lambda _: None)
OPENED = Opened(num_sequences=2, rules=TextRules(detokenize=False), is_streaming=True, return_all=False)


def log_prob(value: float) -> Extras:
    return Extras(log_probs=LogProbs((value,), 0, (), (), (1,)))


def feed(stream: OutputStream, upstream: Feed, num_tokens: int) -> None:
    """Return the feed's data, starting with the first token, for two sequences; each token has a log probability."""
    stream.open(OPENED)
    for index in range(2):
        stream.push(upstream, index, 0, [100 * index + token for token in range(num_tokens)])
        for token in range(num_tokens):
            stream.add_outputs(index, token, log_prob(100 * index + token))


def taken(stream: OutputStream) -> dict[int, tuple[list[int], list[float]]]:
    """Return the delivered tokens and log probabilities by sequence."""
    result = {}
    for chunk in stream.take():
        assert chunk.extras is not None
        assert chunk.extras.log_probs is not None
        result[chunk.sequence_index] = (list(chunk.token_ids), list(chunk.extras.log_probs.token_log_probs))
    return result


def test_log_probabilities_are_delivered_once_after_a_new_feed() -> None:
    upstream = Feed()
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, cast("DecoderFactory", None), 1 << 20)
    feed(stream, upstream, 3)
    assert taken(stream) == {0: ([0, 1, 2], [0, 1, 2]), 1: ([100, 101, 102], [100, 101, 102])}
    feed(stream, upstream, 5)
    feed(stream, upstream, 6)
    assert taken(stream) == {0: ([3, 4, 5], [3, 4, 5]), 1: ([103, 104, 105], [103, 104, 105])}


def test_a_stream_from_an_offset_has_the_log_probabilities_from_there_on() -> None:
    upstream = Feed()
    stream = OutputStream(1, "r", 1, 2, (), ROUTER, cast("DecoderFactory", None), 1 << 20)
    feed(stream, upstream, 4)
    feed(stream, upstream, 5)
    assert taken(stream) == {0: ([2, 3, 4], [2, 3, 4]), 1: ([102, 103, 104], [102, 103, 104])}


class Letters:
    """A decoder that decodes token 0 to a, token 1 to b and so on."""

    def open(self, *, skip_special_tokens: bool) -> Letters:
        return self

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    def copy(self) -> Letters:
        return self

    def finish(self) -> str:
        return ""


def test_outputs_of_tokens_behind_a_stop_word_are_dropped_whenever_they_come() -> None:
    """Outputs of a token may arrive one batch early, before the stop word that precedes the token is known."""
    opened = Opened(1, TextRules(stop_words=TextRules.words(["c"])), is_streaming=True, return_all=False)
    for num_early in range(5):
        upstream, stream = Feed(), OutputStream(1, "r", 1, 0, (), ROUTER, Letters(), 1 << 20)
        stream.open(opened)
        for token in range(num_early):
            stream.add_outputs(0, token, report(token))
        stream.push(upstream, 0, 0, [0, 1])
        for token in range(num_early, 5):
            stream.add_outputs(0, token, report(token))
        stream.push(upstream, 0, 2, [2, 3, 4])
        (chunk,) = stream.take()
        assert (list(chunk.token_ids), chunk.text) == ([0, 1, 2], "ab")
        assert chunk.extras == report(0) + report(1) + report(2)


class Pieces:
    """A tokenizer whose decoder decodes a run of byte tokens as a whole."""

    vocab_size = 5
    special_ids = frozenset({4})

    def token(self, token_id: int) -> str:
        return ("Hi", "<0x0A>", "<0x41>", "<0xF0>", "</s>")[token_id]


BYTES = ByteFallbackFactory(cast("Tokenizer", Pieces()), strip_first_space=False)
AT_LIMIT, AT_END_ID = (FinishReason.LENGTH, None), (FinishReason.STOP, 4)
FOUND = (FinishReason.STOP, "\n")


@pytest.mark.parametrize(
    ("tokens", "end", "rules", "expected"),
    [
        ([0, 1], AT_LIMIT, {}, ("Hi", *FOUND)),
        ([0, 1, 2], AT_LIMIT, {}, ("Hi", *FOUND)),
        ([0, 1, 4], AT_END_ID, {}, ("Hi", *FOUND)),
        ([0, 1], AT_LIMIT, {"include_stop": True}, ("Hi\n", *FOUND)),
        ([0, 1], AT_LIMIT, {"min_tokens": 2}, ("Hi", *FOUND)),
        ([0, 1], AT_LIMIT, {"min_tokens": 3}, ("Hi\n", *AT_LIMIT)),
        ([0, 1, 3], AT_LIMIT, {}, ("Hi\ufffd\ufffd", *AT_LIMIT)),
        ([], AT_LIMIT, {"prompt_ids": (0, 1)}, ("Hi\n", *AT_LIMIT)),
    ],
)
def test_a_stop_word_in_the_last_bytes_is_found_at_the_end(
    tokens: list[int], end: tuple[FinishReason, int | None], rules: dict[str, Any], expected: tuple[object, ...]
) -> None:
    found = TextRules(stop_words=TextRules.words(["\n"]), stop_ids=frozenset({4}), **rules)
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, BYTES, 1 << 20)
    stream.open(Opened(1, found, is_streaming=True, return_all=False))
    upstream = Feed()
    for offset, token in enumerate(tokens):
        stream.push(upstream, 0, offset, [token])
    reason, matched_stop = end
    stream.end_sequence(SequenceEnd(0, reason, len(tokens), matched_stop), upstream)
    stream.end(Usage(1, len(tokens), 0), None, None)
    (chunk,) = stream.take()
    assert (chunk.text, chunk.finish_reason, chunk.matched_stop) == expected
    assert upstream.stops == ([(0, len(tokens), "\n")] if chunk.matched_stop == "\n" else [])
    assert list(chunk.token_ids) == [*found.prompt_ids, *tokens]
    assert chunk.usage == Usage(1, len(tokens), 0)


def test_a_stop_is_sent_again_once_per_new_feed_when_its_tokens_were_resent() -> None:
    """The scheduler may have failed before the stop was committed; its successor ignores a stop beyond the tokens that
    it has.
    """
    opened = Opened(2, TextRules(stop_words=TextRules.words(["c"])), is_streaming=True, return_all=False)
    stream, stop = OutputStream(1, "r", 1, 0, (), ROUTER, Letters(), 1 << 20), (1, 3, "c")
    stream.open(opened)
    first = Feed()
    stream.push(first, 0, 0, [0, 1])
    stream.push(first, 1, 0, [0, 1, 2, 3])
    assert first.stops == [stop]
    for _ in range(2):
        stream.open(opened)
        upstream = Feed()
        stream.push(upstream, 0, 0, [0, 1])
        stream.push(upstream, 1, 0, [0, 1])
        assert not upstream.stops
        stream.push(upstream, 1, 2, [2])
        assert upstream.stops == [stop]
        stream.push(upstream, 1, 3, [3, 4, 5])
        assert upstream.stops == [stop]
    stream.end_sequence(SequenceEnd(1, FinishReason.STOP, 3, "c"))
    stream.open(opened)
    upstream = Feed()
    stream.push(upstream, 1, 0, [0, 1, 2])
    assert not upstream.stops
    assert [(list(chunk.token_ids), chunk.text) for chunk in stream.take()] == [([0, 1], "ab"), ([0, 1, 2], "ab")]


def test_a_stop_is_sent_again_if_the_scheduler_has_ended_the_sequence_elsewhere() -> None:
    """The sequence was complete before its stop word was found, and the scheduler failed before it got the stop."""
    opened = Opened(2, TextRules(stop_words=TextRules.words(["c"])), is_streaming=True, return_all=False)
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, Letters(), 1 << 20)
    stream.open(opened)
    stream.push(Feed(), 0, 0, [0, 1, 2, 3])
    stream.end_sequence(SequenceEnd(0, FinishReason.LENGTH, 4), Feed())
    stream.open(opened)
    upstream = Feed()
    stream.push(upstream, 0, 0, [0, 1, 2, 3])
    assert upstream.stops == [(0, 3, "c")]


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_prompt_only_request_has_the_prompts_outputs(*, is_reopened: bool) -> None:
    """The outputs arrive without a token; the log probability of the sampled token is not part of the output."""
    rules = TextRules(prompt_ids=(0, 1))
    opened = Opened(1, rules, is_streaming=True, return_all=False)
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, Letters(), 1 << 20)
    known = LogProbs((-2.0,), 0, (), (), (1,))
    for _ in range(1 + is_reopened):  # the feed may break before the request's end arrives
        stream.open(opened)
        stream.add_outputs(0, 0, Extras(LogProbs((-1.0,), 0, (), (), (1,)), known))
        stream.end_sequence(SequenceEnd(0, FinishReason.LENGTH, 0))
    stream.end(Usage(2, 0, 0), None, None)
    (chunk,) = stream.take()
    assert (list(chunk.token_ids), chunk.text, chunk.is_final) == ([0, 1], "ab", True)
    assert chunk.extras == Extras(None, known)
    assert chunk.cumulative_log_prob is None


def test_each_row_of_a_block_of_log_probabilities_is_sent_with_its_token() -> None:
    """Otherwise a client that resumes between the tokens would get the later rows twice."""
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, Letters(), 1 << 20)
    stream.open(Opened(1, TextRules(), is_streaming=True, return_all=False))
    stream.add_outputs(0, 0, Extras(LogProbs((-1.0, -2.0, -3.0), 0, (), (), (1, 2, 3))))
    rows = []
    for offset, tokens in ((0, [0]), (1, [1, 2])):
        stream.push(Feed(), 0, offset, tokens)
        (chunk,) = stream.take()
        assert chunk.extras is not None
        assert chunk.extras.log_probs is not None
        rows.append(chunk.extras.log_probs.token_log_probs)
    assert rows == [(-1.0,), (-2.0, -3.0)]


def test_a_batch_has_a_limited_size_and_the_rest_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of all sequences count towards the limit; the final chunk is still the last one of its stream."""
    monkeypatch.setattr(streams, "MAX_BATCH_BYTES", 2000)
    router = RouterConnection(lambda: None, lambda _: None)
    for number in range(2):
        stream = OutputStream(number, "r", number, 0, (), router, Letters(), 1 << 20)
        router.streams[number] = stream
        stream.open(Opened(3, TextRules(), is_streaming=True, return_all=False))
        for index in range(3):
            stream.push(Feed(), index, 0, [index] * 200)
            stream.end_sequence(SequenceEnd(index, FinishReason.LENGTH, 200))
        stream.end(Usage(1, 600, 0), None, None)
    sent = []
    while (batch := router.collect()) is not None:
        chunks = [(chunk.stream, chunk.response) for chunk in batch.chunks]
        sent.append([(number, response.text[:1], response.is_final) for number, response in chunks])
    assert sent == [
        [(0, "a", False), (0, "b", False)],
        [(0, "c", True), (1, "a", False)],
        [(1, "b", False), (1, "c", True)],
    ]
    assert not router.streams


def test_the_rest_of_a_sequences_tensors_precedes_the_final_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_TENSOR_BYTES", 8)
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, Letters(), 1 << 20)
    stream.open(Opened(2, TextRules(), is_streaming=True, return_all=False))
    for index in range(2):
        stream.push(Feed(), index, 0, [0, 1, 2])
        stream.end_sequence(SequenceEnd(index, FinishReason.LENGTH, 3))
    for token in range(3):
        stream.add_outputs(0, token, report(token))
    stream.end(Usage(1, 6, 0), None, None)
    sent = []
    while not stream.is_done:
        chunks = stream.take()
        sent += [(chunk.sequence_index, len(chunk.extras.tensors) if chunk.extras else 0) for chunk in chunks]
    assert sent == [(0, 2), (0, 1), (1, 0)]


def report(token: int) -> Extras:
    """Return the log probability and the logits of a token."""
    logits = Tensor("generation_logits", "float32", (1, 1), bytes(4), 4 * token, is_last=False)
    return Extras(LogProbs((float(token),), 0, (), (), (1,)), tensors=(logits,))


@pytest.mark.parametrize("is_streaming", [False, True])
def test_only_a_stream_that_grows_while_the_router_reads_slowly_is_ended(is_streaming: bool) -> None:
    upstream = Feed()
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, cast("DecoderFactory", None), 2_000)
    rules = TextRules(detokenize=False)
    stream.open(Opened(num_sequences=1, rules=rules, is_streaming=is_streaming, return_all=False))
    for offset in range(0, 1000, 10):
        stream.push(upstream, 0, offset, [7] * 10)
    assert (stream.error is not None) == is_streaming
    if not is_streaming:
        stream.end_sequence(SequenceEnd(0, FinishReason.LENGTH, 1000))
        stream.end(Usage(1, 1000, 0), None, None)
        assert [len(chunk.token_ids) for chunk in stream.take()] == [1000]


def test_a_change_of_kind_is_said_from_its_first_token_to_the_end() -> None:
    upstream = Feed()
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, cast("DecoderFactory", None), 1 << 20)
    stream.open(OPENED)
    stream.push(upstream, 0, 0, [1, 2])
    stream.change_kind([2, 0])
    assert [chunk.kind_changed_at for chunk in stream.take()] == [None]
    stream.push(upstream, 0, 2, [3])
    stream.push(upstream, 1, 0, [4])
    assert [(chunk.sequence_index, chunk.kind_changed_at) for chunk in stream.take()] == [(0, 2), (1, 0)]
    stream.end_sequence(SequenceEnd(0, FinishReason.LENGTH, 3))
    (chunk,) = stream.take()
    assert chunk.to_proto("r").kind_changed_at == 2


def test_the_offset_of_a_change_counts_a_prompt_that_begins_the_output() -> None:
    opened = Opened(
        num_sequences=1, rules=TextRules(detokenize=False, prompt_ids=(7, 8, 9)), is_streaming=True, return_all=False
    )
    stream = OutputStream(1, "r", 1, 0, (), ROUTER, cast("DecoderFactory", None), 1 << 20)
    stream.open(opened)
    stream.change_kind([1])
    stream.push(Feed(), 0, 0, [1, 2])
    assert [chunk.kind_changed_at for chunk in stream.take()] == [4]


def test_the_first_batch_identifies_the_tokenizer() -> None:
    woken: list[bool] = []
    router = RouterConnection(lambda: woken.append(True), lambda _: None, "print")
    router.begin()
    stream = OutputStream(1, "r", 1, 0, (), router, cast("DecoderFactory", None), 1 << 20)
    router.streams[1] = stream
    stream.open(OPENED)
    stream.push(Feed(), 0, 0, [1])
    first, second = router.collect(), router.collect()
    assert first is not None
    assert second is not None
    assert (first.tokenizer_fingerprint, len(first.chunks)) == ("print", 0)
    assert (second.tokenizer_fingerprint, len(second.chunks)) == ("", 1)
    assert len(woken) >= 2


def test_held_tokens_are_reported_alone_before_their_output_and_only_if_there_are_more() -> None:
    router = RouterConnection(lambda: None, lambda _: None)
    for number, is_streaming in ((1, False), (2, True), (3, False)):
        stream = OutputStream(number, "r", number, 2, (), router, Letters(), 1 << 20)
        router.streams[number] = stream
        stream.open(Opened(2, TextRules(), is_streaming=is_streaming, return_all=False))
        stream.push(Feed(), 0, 0, [0, 1, 2, 3, 4])
        stream.push(Feed(), 1, 0, [0, 1, 2])

    def reported() -> list[tuple[int, int]]:
        router.report_progress()
        batch = router.collect()
        assert batch is not None
        assert not batch.chunks
        return [(item.stream, item.num_held_tokens) for item in batch.progress]

    # Of the first sequence, the tokens 2, 3 and 4 are held, and of the second, token 2.
    assert reported() == [(1, 4), (3, 4)]
    streamed = router.collect()
    assert streamed is not None
    assert {chunk.stream for chunk in streamed.chunks} == {2}
    router.report_progress()
    assert router.collect() is None
    router.streams[3].push(Feed(), 1, 3, [3])
    assert reported() == [(3, 5)]
    router.streams[1].push(Feed(), 1, 3, [3, 4])
    router.streams[1].end_sequence(SequenceEnd(0, FinishReason.LENGTH, 5))
    # The tokens of the first sequence, which are ready now, are not held; those of the second are fewer than before.
    router.report_progress()
    ended = router.collect()
    assert ended is not None
    assert [(chunk.stream, len(chunk.response.token_ids)) for chunk in ended.chunks] == [(1, 3)]
