"""The endpoints for embeddings, scores, reranking and classification.

A score is the probability that the model answers yes, if it was trained to answer (answers.py); otherwise it is the
cosine similarity of the two texts' embeddings. Reranking sorts documents by their scores for the query. Classification
returns the most likely class and the probabilities of all, in vLLM's format.
"""

from __future__ import annotations

import base64
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.chunk import Usage
from midstream.errors import UnsupportedError
from router.pipeline.answers import classes_of
from router.pipeline.embedder import Embedder, Pair, Vector, VectorShape, dot
from router.pipeline.idempotency import HEADER, check_key, check_no_id, request_id_of
from router.protocols.body_reader import BodyReader
from router.protocols.embeddings.request import (
    ClassifyJob,
    EmbeddingJob,
    RerankJob,
    ScoreJob,
    VectorsJob,
    read_classify,
    read_embeddings,
    read_rerank,
    read_score,
)
from router.protocols.fields import ignored_header
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import Endpoint, mapped
from router.protocols.openai.models import Models
from router.protocols.openai.shapes import usage_fields
from router.protocols.streaming import CompleteResponse

_Answer = Mapping[str, object] | list[dict[str, object]]
_JobT = TypeVar("_JobT", bound=EmbeddingJob)
_FoundT = TypeVar("_FoundT")
_UNIT = VectorShape()


class EmbeddingsApi:
    """Serves the endpoints for embeddings, scores, reranking and classification."""

    def __init__(self, embedder: Embedder, bodies: BodyReader) -> None:
        self._embedder = embedder
        self._front = embedder.front
        self._bodies = bodies
        self._models = Models(self._front.runner.model, self._front.runner.cells)

    def routes(self) -> list[Route]:
        endpoints: dict[str, Endpoint] = {"/v1/embeddings": self._embeddings, "/classify": self._classify}
        endpoints |= dict.fromkeys(("/score", "/v1/score"), self._score)
        endpoints |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), self._rerank)
        return [Route(path, mapped(endpoint, ()), methods=["POST"]) for path, endpoint in endpoints.items()]

    async def _embeddings(self, request: Request) -> Response:
        def answer(job: VectorsJob, vectors: list[Vector], usage: Usage) -> _Answer:
            shown = [_base64(vector) if job.is_base64 else vector for vector in vectors]
            data = [{"object": "embedding", "index": index, "embedding": item} for index, item in enumerate(shown)]
            return {"object": "list", "data": data, "model": self._name(job), "usage": _usage(usage)}

        return await self._run(request, read_embeddings, self._vectors, answer)

    async def _classify(self, request: Request) -> Response:
        def answer(job: ClassifyJob, scores: list[Vector], usage: Usage) -> _Answer:
            classes, data = classes_of(self._front.runner.model), list[dict[str, object]]()
            for index, values in enumerate(scores):
                probabilities = classes.probabilities(values, is_raw=job.is_raw)
                label = classes.labels[max(range(len(values)), key=values.__getitem__)]
                num_classes = len(classes.labels)
                data.append({"index": index, "label": label, "probs": probabilities, "num_classes": num_classes})
            head = {"id": f"classify-{job.base.request_id}", "object": "list", "created": int(time.time())}
            return {**head, "model": self._name(job), "data": data, "usage": _usage(usage)}

        return await self._run(request, read_classify, self._class_scores, answer)

    async def _score(self, request: Request) -> Response:
        def answer(job: ScoreJob, scores: list[float], usage: Usage) -> _Answer:
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            head = {"id": f"score-{job.base.request_id}", "object": "list", "created": int(time.time())}
            return {**head, "model": self._name(job), "data": data, "usage": _usage(usage)}

        return await self._run(request, read_score, self._scores, answer)

    async def _rerank(self, request: Request) -> Response:
        def answer(job: RerankJob, scores: list[float], usage: Usage) -> _Answer:
            order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: job.top_n]
            if job.is_tei:
                texts = [{"text": job.documents[index]} if job.returns_documents else {} for index in order]
                pairs = zip(order, texts, strict=True)
                return [{"index": index, "score": scores[index], **text} for index, text in pairs]
            results: list[dict[str, object]] = [{"index": index, "relevance_score": scores[index]} for index in order]
            if job.returns_documents:
                for result, index in zip(results, order, strict=True):
                    result["document"] = {"text": job.documents[index]}
            head = {"id": f"rerank-{job.base.request_id}", "model": self._name(job)}
            return {**head, "results": results, "usage": _usage(usage)}

        return await self._run(request, read_rerank, self._scores, answer)

    async def _vectors(self, job: VectorsJob, key: str) -> tuple[list[Vector], Usage]:
        return await self._embedder.embed(
            job.base,
            job.inputs,
            job.shape,
            pooling=job.pooling,
            prompt_name=job.prompt_name,
            key=key,
            truncate=job.truncate,
        )

    async def _class_scores(self, job: ClassifyJob, key: str) -> tuple[list[Vector], Usage]:
        return await self._embedder.classify(job.base, job.inputs, key, job.truncate)

    async def _scores(self, job: ScoreJob, key: str) -> tuple[list[float], Usage]:
        answers = self._embedder.answers
        num_labels = self._front.runner.model.num_labels
        if answers is None and num_labels is not None and job.pooling is None:
            reason = f"must be set: scores need one or two classes, but the model has {num_labels}; use /classify"
            raise UnsupportedError(reason, field="pooling")
        if answers is None or job.pooling is not None:
            if job.raw_field:
                raise UnsupportedError("must not be set: the scores are cosine similarities", field=job.raw_field)
            vectors, usage = await self._embedder.embed(
                job.base, job.inputs, _UNIT, pooling=job.pooling, key=key, truncate=job.truncate
            )
            return [dot(vectors[left], vectors[right]) for left, right in job.pairs], usage
        pairs = [
            Pair(job.inputs[right].field, str(job.inputs[left].prompt), str(job.inputs[right].prompt))
            for left, right in job.pairs
        ]
        return await self._embedder.score(answers, job.base, pairs, key, job.truncate, is_raw=bool(job.raw_field))

    async def _run(
        self,
        request: Request,
        read: Callable[[Body], _JobT],
        compute: Callable[[_JobT, str], Awaitable[tuple[_FoundT, Usage]]],
        answer: Callable[[_JobT, _FoundT, Usage], _Answer],
    ) -> Response:
        key = check_key(request.headers.get(HEADER))
        with self._front.counting_failures("embeddings"):
            job = await self._bodies.read(request, read)
        if key:
            check_no_id(job.base.request_id)
            job.base.request_id = request_id_of(key, request.url.path)
        job.base.request_id = job.base.request_id or uuid.uuid4().hex
        await self._models.resolve([job.base])

        async def respond() -> Response:
            found, usage = await compute(job, key)
            headers = {"x-request-id": quote(job.base.request_id, safe=""), **ignored_header(job.ignored)}
            return JSONResponse(answer(job, found, usage), headers=headers)

        return CompleteResponse(respond)

    def _name(self, job: EmbeddingJob) -> str:
        return job.model or self._front.runner.model.name


def _base64(vector: Vector) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _usage(usage: Usage) -> dict[str, object]:
    shown = usage_fields(usage)
    del shown["completion_tokens"]
    return shown
