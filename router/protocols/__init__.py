"""APIs for existing clients; each is translated into native calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from midstream.rpc.serving import Server
from protos import kserve_pb2_grpc, openengine_pb2_grpc, service_pb2_grpc
from router.protocols.kserve.servicer import KserveServicer
from router.protocols.model_servicer import ModelServicer
from router.protocols.openengine.servicer import ControlServicer, InferenceServicer
from router.protocols.served_models import ServedModels
from router.servicer import RouterServicer
from router.status import StatusFeed

SERVICE = "midstream.v1.Midstream"
ADAPTED_SERVICES = ("inference.GRPCInferenceService", "openengine.v1.Inference", "openengine.v1.Control")
_ServicerT = TypeVar("_ServicerT")


def add_servicers(
    server: Server, models: ServedModels, status: StatusFeed, router_id: str
) -> Mapping[str, KserveServicer]:
    """Add the public gRPC services to a router's server: the native one, KServe's and openengine's. Return KServe's for
    each model, which the HTTP port serves as well.
    """
    served = models.models.items()
    natives = {name: RouterServicer(it.front, status, router_id, it.chat.tokens) for name, it in served}
    kserve = {name: KserveServicer(it.front, it.chat.tokens) for name, it in served}
    inference = {name: InferenceServicer(it.front, it.chat.tokens) for name, it in served}
    control = {name: ControlServicer(it.front, natives[name], list(models.models)) for name, it in served}
    for servicer in kserve.values():
        servicer.peers = kserve
    service_pb2_grpc.add_MidstreamServicer_to_server(_one(models, natives), server.grpc)
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_one(models, kserve), server.grpc)
    openengine_pb2_grpc.add_InferenceServicer_to_server(_one(models, inference), server.grpc)
    openengine_pb2_grpc.add_ControlServicer_to_server(_one(models, control), server.grpc)
    return kserve


def _one(models: ServedModels, servicers: Mapping[str, _ServicerT]) -> _ServicerT:
    """Return a servicer for all models."""
    if len(servicers) == 1:
        return servicers[models.first.name]
    return cast("_ServicerT", ModelServicer(models, servicers))
