"""The names that `model` accepts: the served models and their loaded adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import grpc
import grpc.aio

from midstream.errors import DeadlineError, MidstreamError, NotFoundError, UnavailableError
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
    """Lists and resolves the names of one model and its adapters for OpenAI's clients.

    Attributes:
        folder: The model.
    """

    def __init__(self, model: ModelFolder, cells: Cells) -> None:
        self.folder = model
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
        if name in self.folder.names:
            return self._card() | {"id": name}
        adapter = await self._adapter(name)
        if adapter is None:
            raise not_served(name, [self.folder])
        return self._adapter_card(adapter)

    async def has_adapter(self, name: str) -> bool:
        """Return whether the model has an adapter of this name. Raises MidstreamError if no scheduler answers."""
        return await self._adapter(name) is not None

    async def resolve(self, requests: Iterable[pb.GenerateRequest]) -> None:
        """Where a request's `model` names an adapter, request that adapter instead."""
        for request in requests:
            if request.model in ("", *self.folder.names):
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
        model = self.folder
        card = {"id": model.name, "object": "model", "created": model.copied_unix_s, "owned_by": "midstream"}
        card |= {"root": model.name, "parent": None, "max_model_len": model.max_sequence_length}
        return {**card, "abilities": abilities_of(model)}

    def _adapter_card(self, adapter: loads_pb2.LoraInfo) -> dict[str, object]:
        root = adapter.path if Role.ADMIN in current_caller.get().roles else adapter.name
        return {**self._card(), "id": adapter.name, "root": root, "parent": self.folder.name}


class Catalog:
    """Lists the models of a router, with their adapters."""

    def __init__(self, models: Sequence[Models]) -> None:
        self._models = models

    async def cards(self) -> list[dict[str, object]]:
        """Return all models and adapters; no adapters of a model whose schedulers do not respond."""
        return [card for cards in await asyncio.gather(*(one.cards() for one in self._models)) for card in cards]

    async def card(self, name: str) -> dict[str, object]:
        """Return a model or adapter; raises the errors of `find`."""
        return await (await self.find(name)).card(name)

    async def find(self, name: str) -> Models:
        """Return the model that has a name, or an adapter of this name. Raises NotFoundError if there is none, or
        MidstreamError if the adapters of some model are not known.
        """
        own = next((one for one in self._models if name in one.folder.names), None)
        if own is not None:
            return own
        failure: MidstreamError = not_served(name, [one.folder for one in self._models])
        for one in self._models:
            try:
                if await one.has_adapter(name):
                    return one
            except (UnavailableError, DeadlineError) as error:
                failure = error
        raise failure


def abilities_of(model: ModelFolder) -> list[str]:
    """Return what requests may ask of a model: `embeddings` and `classification`, or `completions` and `embeddings`,
    with `chat` and `images` if it has a chat template and reads images.
    """
    if model.num_labels is not None:
        return ["embeddings", "classification"]
    if model.is_encoder or not model.has_head:
        return ["embeddings"]
    optional = (("chat", model.chat_template is not None), ("images", model.image_token_id is not None))
    return ["completions", "embeddings", *(name for name, has_it in optional if has_it)]


def not_served(name: str, models: Sequence[ModelFolder]) -> NotFoundError:
    """Return the error for a name that is none of the models'."""
    names = [repr(name) for model in models for name in model.names]
    known = f"the models are {', '.join(names)}" if len(names) > 1 else f"the model is {names[0]}"
    return NotFoundError(f"{name[:MAX_NAME]!r} is not served here; {known}", field="model")
