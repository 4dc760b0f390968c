"""Log probabilities in responses belong to the tokens of messages, however the tokens arrive."""

from __future__ import annotations

import codecs
import random
from typing import Any

import pytest

from midstream.chunk import Chunk, FinishReason
from midstream.extras import Extras, LogProbs
from router.protocols.conversation import ChatModel, SequenceReader
from router.protocols.openai.body import Body
from router.protocols.responses.log_probs import TokenLogProbs
from router.protocols.responses.request import read_response
from router.protocols.responses.writer import ResponseWriter
from tests.router.parsers.transcripts import model_format

# The tokens of one output: parts of characters, words, a special token that the text omits (""), and the end.
PIECES = [
    b"<think>", b"Hm", b"m", b".</", b"think>", b"\n\n", b"It is", b" ", b"\xe6\x97", b"\xa5", b"\xe6", b"\x9c\xac",
    b"!", b"", b" An", b"swer", b"ed.", b"",
]  # fmt: skip
SKIPPED = frozenset((13, 17))


def chunks_of(seed: int) -> list[Chunk]:
    """Return the output in random groups of tokens. Token i has the log probability -i."""
    dice, decoder = random.Random(seed), codecs.getincrementaldecoder("utf-8")()
    chunks, first = [], 0
    while first < len(PIECES):
        ids = tuple(range(first, min(first + dice.randint(1, 6), len(PIECES))))
        rows = LogProbs(tuple(-float(i) for i in ids), 1, ids, tuple(-float(i) for i in ids), tuple(1 for _ in ids))
        text = decoder.decode(b"".join(PIECES[i] for i in ids))
        chunks.append(Chunk(0, first, list(ids), text, extras=Extras(log_probs=rows)))
        first = ids[-1] + 1
    chunks[-1].finish_reason, chunks[-1].is_sequence_final = FinishReason.STOP, True
    return chunks


def written(chunks: list[Chunk], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a response with log probabilities."""
    model = ChatModel(model_format("hermes", "think"))
    job = read_response(Body({"input": "Hi", "include": ["message.output_text.logprobs"], **fields}), model)
    assert job.num_top_log_probs is not None
    log_probs = TokenLogProbs(PIECES.__getitem__, SKIPPED, job.num_top_log_probs)
    writer, reader = ResponseWriter("resp_1", {}, log_probs=log_probs), SequenceReader(job.conversation, "r", 0)
    events = writer.begin()
    for chunk in chunks:
        events += writer.add(chunk, reader.read(chunk.text, is_final=chunk.is_sequence_final))
    return [*events, *writer.end(chunks[-1], {})]


def test_the_tokens_of_a_message_are_listed() -> None:
    events = written(chunks_of(0))
    (part,) = events[-1]["response"]["output"][1]["content"]
    assert part["text"] == "It is 日本! Answered."
    assert [entry["logprob"] for entry in part["logprobs"]] == [-6, -7, -8, -9, -10, -11, -12, -14, -15, -16]
    assert part["logprobs"][2] == {"token": "\\xe6\\x97", "bytes": [0xE6, 0x97], "logprob": -8.0, "top_logprobs": []}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], [entry["logprob"] for entry in event["logprobs"]]) for event in deltas] == [
        ("It", [-6]), (" is", []), (" 日", [-7, -8, -9]), ("本", [-10, -11]), ("!", [-12]),
        (" Answered", [-14, -15, -16]), (".", []),
    ]  # fmt: skip
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]


@pytest.mark.parametrize("seed", range(1, 30))
def test_events_do_not_depend_on_how_tokens_arrive(seed: int) -> None:
    assert written(chunks_of(seed), top_logprobs=1) == written(chunks_of(0), top_logprobs=1)


def test_likely_tokens_are_listed() -> None:
    (part,) = written(chunks_of(0), top_logprobs=1)[-1]["response"]["output"][1]["content"]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "It is", "bytes": list(b"It is"), "logprob": -6.0}]


def test_likely_tokens_need_log_probabilities() -> None:
    job = read_response(Body({"input": "Hi", "top_logprobs": 3}), ChatModel())
    assert (job.ignored, job.num_top_log_probs) == (["top_logprobs"], None)
    assert not job.conversation.request.output.HasField("log_probs")
    assert job.echo["top_logprobs"] == 3
