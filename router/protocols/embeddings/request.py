"""Reads the bodies of /v1/embeddings, /score and /rerank."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from router.pipeline.embedder import EmbedInput, Pooling, VectorShape
from router.protocols.fields import EMBEDDINGS, RERANK, SCORE, Table, check_fields, ignored_fields
from router.protocols.openai.body import Body, token_ids
from router.protocols.openai.parameters import read_priority


@dataclass(slots=True)
class EmbeddingJob:
    """A call to any of the endpoints.

    Attributes:
        base: The native request of each input, without its prompt.
        pooling: How to pool; None for the pooling that the model was trained for.
        ignored: Fields of the body that have no effect.
    """

    base: pb.GenerateRequest
    model: str
    inputs: list[EmbedInput]
    pooling: Pooling | None
    ignored: list[str]


@dataclass(slots=True)
class VectorsJob(EmbeddingJob):
    """A call to /v1/embeddings."""

    shape: VectorShape
    is_base64: bool
    prompt_name: str | None


@dataclass(slots=True)
class ScoreJob(EmbeddingJob):
    """A call to /score.

    Attributes:
        pairs: For each score, the indexes of its two texts in `inputs`.
    """

    pairs: list[tuple[int, int]]


@dataclass(slots=True)
class RerankJob(ScoreJob):
    """A call to /rerank; the query is the first input, and the documents follow.

    Attributes:
        returns_documents: Whether the results contain the documents' text.
        is_tei: Whether the body has the form of Text Embeddings Inference, as the answer then has, too.
    """

    top_n: int
    returns_documents: bool
    is_tei: bool

    @property
    def documents(self) -> list[str]:
        return [str(item.prompt) for item in self.inputs[1:]]


def read_embeddings(body: Body) -> VectorsJob:
    """Read a body of /v1/embeddings. Raises MidstreamError if a field is invalid or not supported."""
    check_fields(body, EMBEDDINGS)
    value = body.get("input")
    items = value if isinstance(value, list) else [value]
    if not items:
        raise InvalidArgumentError("must not be empty", field="input")
    if isinstance(value, list) and isinstance(items[0], int):
        inputs = [EmbedInput("input", token_ids(items, "input"))]
    elif isinstance(value, list):
        inputs = [_item(item, f"input[{index}]") for index, item in enumerate(items)]
    else:
        inputs = [_item(value, "input")]
    encoding = body.choice("encoding_format", ("float", "base64"))
    shape = VectorShape(body.integer("dimensions"), body.flag("normalize") is not False)
    prompt_name = body.text("prompt_name")
    return VectorsJob(*_common(body, inputs, EMBEDDINGS), shape, encoding == "base64", prompt_name)


def read_score(body: Body) -> ScoreJob:
    """Read a body of /score; raises the errors of `read_embeddings`."""
    check_fields(body, SCORE)
    names = ("queries", "documents") if body.has("queries") else ("text_1", "text_2")
    left, right = (body.texts(name) for name in names)
    for name, texts in zip(names, (left, right), strict=True):
        if not texts:
            raise InvalidArgumentError("must be a text or an array of texts", field=name)
    if len(left) not in (1, len(right)):
        raise InvalidArgumentError(f"has {len(left)} texts; must have one, or as many as {names[1]}", field=names[0])
    inputs = [_named(names[0], index, text) for index, text in enumerate(left)]
    inputs += [_named(names[1], index, text) for index, text in enumerate(right)]
    pairs = [(index if len(left) > 1 else 0, len(left) + index) for index in range(len(right))]
    return ScoreJob(*_common(body, inputs, SCORE), pairs)


def read_rerank(body: Body) -> RerankJob:
    """Read a body of /rerank; raises the errors of `read_embeddings`."""
    check_fields(body, RERANK)
    query = body.text("query")
    if query is None:
        raise InvalidArgumentError("must be set", field="query")
    is_tei = body.has("texts")
    name = "texts" if is_tei else "documents"
    if is_tei and body.has("documents"):
        raise InvalidArgumentError("must not be set together with documents", field="texts")
    documents = [_document(item, f"{name}[{index}]") for index, item in enumerate(body.array(name))]
    if not documents:
        raise InvalidArgumentError("must be an array of texts", field=name)
    top_n = body.integer("top_n")
    inputs = [EmbedInput("query", query), *(_named(name, i, text) for i, text in enumerate(documents))]
    returns_documents = bool(body.flag("return_text")) if is_tei else body.flag("return_documents") is not False
    # As in vLLM, 0 means all documents.
    pairs = [(0, index) for index in range(1, len(inputs))]
    num_returned = min(top_n or len(documents), len(documents))
    return RerankJob(*_common(body, inputs, RERANK), pairs, num_returned, returns_documents, is_tei)


def _common(
    body: Body, inputs: list[EmbedInput], table: Table
) -> tuple[pb.GenerateRequest, str, list[EmbedInput], Pooling | None, list[str]]:
    model = body.text("model") or ""
    base = pb.GenerateRequest(
        request_id=body.text("request_id") or "",
        model=model,
        client_id=body.text("user") or "",
        priority=read_priority(body),
        cache_salt=body.text("cache_salt") or "",
    )
    timeout_ms = body.integer("timeout_ms", 1, 1 << 53)
    if timeout_ms is not None:
        base.timeout_ms = timeout_ms
    pooling = body.choice("pooling", tuple(Pooling))
    return base, model, inputs, Pooling(pooling) if pooling else None, ignored_fields(body, table)


def _item(value: object, field: str) -> EmbedInput:
    if isinstance(value, str):
        return EmbedInput(field, value)
    if isinstance(value, list):
        return EmbedInput(field, token_ids(value, field))
    raise InvalidArgumentError("must be text, token ids, or an array of either", field=field)


def _named(name: str, index: int, text: str) -> EmbedInput:
    return EmbedInput(f"{name}[{index}]", text)


def _document(item: object, field: str) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise InvalidArgumentError("must be a text, or an object with a text", field=field)
    return text
