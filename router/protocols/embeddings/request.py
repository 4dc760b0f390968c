"""Reads the bodies of /v1/embeddings, /score, /rerank and /classify."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from router.pipeline.embedder import EmbedInput, Pooling, VectorShape
from router.protocols.fields import CLASSIFY, EMBEDDINGS, RERANK, SCORE, Table, check_fields, ignored_fields
from router.protocols.openai.body import Body, token_ids
from router.protocols.openai.parameters import read_priority


@dataclass(slots=True)
class EmbeddingJob:
    """A call to any of the endpoints.

    Attributes:
        base: The native request of each input, without its prompt.
        pooling: How to pool; None for the pooling that the model was trained for.
        ignored: Fields of the body that have no effect.
        truncate: Number of tokens to which inputs are truncated, as in `Embedder.embed`.
    """

    base: pb.GenerateRequest
    model: str
    inputs: list[EmbedInput]
    pooling: Pooling | None
    ignored: list[str]
    truncate: int | None


@dataclass(slots=True)
class VectorsJob(EmbeddingJob):
    """A call to /v1/embeddings."""

    shape: VectorShape
    is_base64: bool
    prompt_name: str | None


@dataclass(slots=True)
class ClassifyJob(EmbeddingJob):
    """A call to /classify.

    Attributes:
        is_raw: Whether logits are returned, instead of probabilities.
    """

    is_raw: bool


@dataclass(slots=True)
class ScoreJob(EmbeddingJob):
    """A call to /score.

    Attributes:
        pairs: For each score, the indexes of its two texts in `inputs`.
        raw_field: The field that asks for logits instead of scores; empty if none does.
    """

    pairs: list[tuple[int, int]]
    raw_field: str


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
    inputs = _inputs(body)
    encoding = body.choice("encoding_format", ("float", "base64"))
    shape = VectorShape(body.integer("dimensions"), body.flag("normalize") is not False)
    prompt_name = body.text("prompt_name")
    return VectorsJob(*_common(body, inputs, EMBEDDINGS), shape, encoding == "base64", prompt_name)


def read_classify(body: Body) -> ClassifyJob:
    """Read a body of /classify; raises the errors of `read_embeddings`."""
    check_fields(body, CLASSIFY)
    inputs, is_raw = _inputs(body), body.flag("use_activation") is False
    return ClassifyJob(*_common(body, inputs, CLASSIFY), is_raw)


def _inputs(body: Body) -> list[EmbedInput]:
    value = body.get("input")
    items = value if isinstance(value, list) else [value]
    if not items:
        raise InvalidArgumentError("must not be empty", field="input")
    if isinstance(value, list) and isinstance(items[0], int):
        return [EmbedInput("input", token_ids(items, "input"))]
    if isinstance(value, list):
        return [_item(item, f"input[{index}]") for index, item in enumerate(items)]
    return [_item(value, "input")]


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
    raw_field = _raw_field(body)
    return ScoreJob(*_common(body, inputs, SCORE), pairs, raw_field)


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
    raw_field = _raw_field(body)
    return RerankJob(*_common(body, inputs, RERANK), pairs, raw_field, num_returned, returns_documents, is_tei)


def _raw_field(body: Body) -> str:
    """Return the field that asks for logits instead of scores; empty if none does."""
    if body.flag("use_activation") is False:
        return "use_activation"
    return "raw_scores" if body.flag("raw_scores") else ""


def _truncate(body: Body) -> int | None:
    """Return the number of tokens to which inputs are truncated."""
    limit = body.integer("truncate_prompt_tokens", -1)
    if limit == 0:
        raise InvalidArgumentError("must be at least 1, or -1 for the model's limit", field="truncate_prompt_tokens")
    body.get("truncation_direction")  # right, as the check of the fields ensures
    cuts = body.flag("truncate")
    return -1 if limit is None and cuts else limit


def _common(
    body: Body, inputs: list[EmbedInput], table: Table
) -> tuple[pb.GenerateRequest, str, list[EmbedInput], Pooling | None, list[str], int | None]:
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
    truncate = _truncate(body)
    return base, model, inputs, Pooling(pooling) if pooling else None, ignored_fields(body, table), truncate


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
