"""The models of a router, and the choice of one for each request.

All parts that depend on the model (schedulers, detokenizers, tokenizer, chat format) exist once for each; what clients
share across models (limits, quotas, files, batches, conversations) exists once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import NotFoundError
from midstream.model.folder import ModelFolder
from router.pipeline.cells import Cell
from router.pipeline.generation import FrontDoor
from router.pipeline.kept_requests import KeptRequests
from router.protocols.conversation import ChatModel
from router.protocols.openai.models import Catalog, Models

# Chooses the model of calls that have no field for it.
MODEL_HEADER = "x-midstream-model"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a router."""

    front: FrontDoor
    chat: ChatModel

    @property
    def folder(self) -> ModelFolder:
        """The model's folder."""
        return self.front.runner.model

    @property
    def name(self) -> str:
        """Its name in the API."""
        return self.folder.name


class ServedModels:
    """The models of a router; there is at least one.

    Attributes:
        models: By name; the first serves requests without a model.
        catalog: Lists them with their adapters.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.name: model for model in models}
        self.first = models[0]
        self.catalog = Catalog([Models(model.folder, model.front.runner.cells) for model in models])
        self._kept = KeptRequests(self.first.front.runner.everywhere)

    async def named(self, name: str) -> str:
        """Return the name of the model that has a name, alias or adapter; the first one's if the name is empty. Raises
        the errors of `Catalog.find`.
        """
        if not name or name in self.models:
            return name or self.first.name
        return (await self.catalog.find(name)).folder.name

    def known(self, name: str) -> str:
        """Return the name of the model that has a name or alias; empty if there is none."""
        return next((own for own, model in self.models.items() if name in model.folder.names), "")

    def folder_of(self, cell: Cell) -> ModelFolder | None:
        """Return the model of a cell; None if there is only one model."""
        if len(self.models) == 1:
            return None
        found = (model.folder for model in self.models.values() if cell in model.front.runner.cells.cells.values())
        return next(found, None)

    async def running(self, request_id: str) -> str:
        """Return the name of the model of a request of the caller, given the id under which the caller knows it; the
        first one's if no scheduler has the request. Raises UnavailableError if a scheduler that may have it does not
        respond.
        """
        try:
            name = (await self._kept.get(request_id)).request.model
        except NotFoundError:
            name = ""
        return name if name in self.models else self.first.name
