"""The names that `model` accepts: the served model and its loaded adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio

from midstream.errors import DeadlineError, NotFoundError, UnavailableError
from midstream.model.folder import ModelFolder
from midstream.rpc.errors import error_from_rpc
from protos import generation_pb2 as pb
from protos import loads_pb2
from router.authentication import current_caller
from router.permissions import Role
from router.pipeline.cells import Cells
from router.pipeline.request_checks import MAX_NAME

_TIMEOUT_S = 5.0
_FRESH_S = 1.0


class Models:
    """Lists and resolves model names for OpenAI's clients."""

    def __init__(self, model: ModelFolder, cells: Cells) -> None:
        self._model = model
        self._cells = cells
        self._adapters: dict[str, loads_pb2.LoraInfo] = {}
        self._fresh_until = 0.0

    async def cards(self) -> list[dict[str, object]]:
        """Return the model and its adapters; only the model if no scheduler responds."""
        try:
            adapters = await self._listed()
        except (UnavailableError, DeadlineError):
            adapters = {}
        return [self._card(), *map(self._adapter_card, adapters.values())]

    async def card(self, name: str) -> dict[str, object]:
        """Return a model or adapter. Raises NotFoundError if it does not exist, or MidstreamError if no scheduler
        answers.
        """
        if name == self._model.name:
            return self._card()
        adapter = await self._adapter(name)
        if adapter is None:
            raise NotFoundError(
                f"{name[:MAX_NAME]!r} is not served here; the model is {self._model.name!r}", field="model"
            )
        return self._adapter_card(adapter)

    async def resolve(self, requests: Iterable[pb.GenerateRequest]) -> None:
        """Where a request's `model` names an adapter, request that adapter instead."""
        for request in requests:
            if request.model in ("", self._model.name):
                continue
            adapter = await self._adapter(request.model)
            if adapter is None:
                continue  # rejected by the request checks
            request.model = ""
            if adapter.num_virtual_tokens:
                request.prompt_tuning.name = adapter.name
            else:
                request.lora.name = adapter.name

    async def _adapter(self, name: str) -> loads_pb2.LoraInfo | None:
        """Return an adapter by name, from a short-lived cache that is refreshed if the name is missing."""
        if name not in self._adapters or asyncio.get_running_loop().time() >= self._fresh_until:
            await self._listed()
        return self._adapters.get(name)

    async def _listed(self) -> dict[str, loads_pb2.LoraInfo]:
        try:
            listed = await self._cells.any().watch_stub.ListLoras(loads_pb2.ListLorasRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        self._adapters = {item.name: item for item in listed.loras}
        self._fresh_until = asyncio.get_running_loop().time() + _FRESH_S
        return self._adapters

    def _card(self) -> dict[str, object]:
        model = self._model
        card = {"id": model.name, "object": "model", "created": model.copied_unix_s, "owned_by": "midstream"}
        return {**card, "root": model.name, "parent": None, "max_model_len": model.max_sequence_length}

    def _adapter_card(self, adapter: loads_pb2.LoraInfo) -> dict[str, object]:
        root = adapter.path if Role.ADMIN in current_caller.get().roles else adapter.name
        return {**self._card(), "id": adapter.name, "root": root, "parent": self._model.name}
