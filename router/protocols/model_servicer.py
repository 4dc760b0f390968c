"""Passes calls of the gRPC services to the servicer of the model that they name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from google.protobuf.message import Message
from grpc.aio import ServicerContext

from protos import kserve_pb2, service_pb2
from router.protocols.served_models import MODEL_HEADER, ServedModels

# Messages whose field for the model has another name than `model`. The servicers of KServe's requests in a stream
# choose the model for each of them.
_FIELDS = {
    kserve_pb2.ModelInferRequest: "model_name",
    kserve_pb2.ModelMetadataRequest: "name",
    kserve_pb2.ModelConfigRequest: "name",
    kserve_pb2.ModelReadyRequest: "name",
    kserve_pb2.ModelStatisticsRequest: "name",
}


class ModelServicer:
    """Has the methods of a servicer, each of which calls the method of the servicer of the request's model.

    The model of a call is that of its field, otherwise of its metadata (MODEL_HEADER), otherwise the first; Resume goes
    to the model of the request.
    """

    def __init__(self, models: ServedModels, servicers: Mapping[str, object]) -> None:
        """`servicers` are by the names of the models, all of the same class."""
        self._models, self._servicers = models, servicers

    def __getattr__(self, method: str) -> Callable[..., Any]:
        calls: dict[str, Callable[..., Any]] = {
            name: getattr(servicer, method) for name, servicer in self._servicers.items()
        }

        async def answer(request: object, context: ServicerContext[Any, Any]) -> object:
            return await calls[await self._name(request, context)](request, context)

        async def stream(request: object, context: ServicerContext[Any, Any]) -> AsyncIterator[object]:
            async with contextlib.aclosing(calls[await self._name(request, context)](request, context)) as items:
                async for item in items:
                    yield item

        return stream if inspect.isasyncgenfunction(calls[self._models.first.name]) else answer

    async def _name(self, request: object, context: ServicerContext[Any, Any]) -> str:
        if isinstance(request, service_pb2.ResumeRequest):
            return await self._models.running(request.request_id)
        field, name = _FIELDS.get(type(request), "model"), ""
        if isinstance(request, Message) and field in request.DESCRIPTOR.fields_by_name:
            name = str(getattr(request, field))
        if type(request) in _FIELDS:
            name = self._models.known(name)  # the first servicer refuses other names in the words of its protocol
        return await self._models.named(name or _metadata(context))


def _metadata(context: ServicerContext[Any, Any]) -> str:
    values = [value for name, value in context.invocation_metadata() or () if name == MODEL_HEADER]
    return str(values[-1]) if values else ""
