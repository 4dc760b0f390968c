"""APIs for existing clients; each is translated into native calls."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.rpc.serving import Server
from protos import kserve_pb2_grpc, openengine_pb2_grpc, service_pb2_grpc
from router.pipeline.generation import FrontDoor
from router.protocols.kserve.servicer import KserveServicer
from router.protocols.openengine.servicer import ControlServicer, InferenceServicer
from router.servicer import RouterServicer
from router.status import StatusFeed

SERVICE = "midstream.v1.Midstream"
ADAPTED_SERVICES = ("inference.GRPCInferenceService", "openengine.v1.Inference", "openengine.v1.Control")


def add_servicers(
    server: Server, front: FrontDoor, status: StatusFeed, router_id: str, tokens: Mapping[str, int]
) -> KserveServicer:
    """Add the public gRPC services to a router's server: the native one, KServe's and openengine's. Return KServe's,
    which the HTTP port serves as well. `tokens` are the markers of the model's format that are a single token, with the
    token's id.
    """
    native = RouterServicer(front, status, router_id, tokens)
    service_pb2_grpc.add_MidstreamServicer_to_server(native, server.grpc)
    kserve = KserveServicer(front, tokens)
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, server.grpc)
    openengine_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(front, tokens), server.grpc)
    openengine_pb2_grpc.add_ControlServicer_to_server(ControlServicer(front, native), server.grpc)
    return kserve
