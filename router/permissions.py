"""The roles that each gRPC method and HTTP path requires."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from midstream.errors import ConfigError


class Role(StrEnum):
    """What a caller may do.

    GENERATE: run requests, and read, resume and abort one's own requests. OBSERVE: read metrics, loads and status,
    which hold no contents of requests. ADMIN: all of the above, and manage adapters and weights, pause generation, read
    KV events (which hold the tokens of all prompts) and access other callers' requests.
    """

    GENERATE = "generate"
    OBSERVE = "observe"
    ADMIN = "admin"


ALL_ROLES = frozenset(Role)
DEFAULT_ROLES = frozenset({Role.GENERATE, Role.OBSERVE})

_GENERATE = frozenset({Role.GENERATE})
_OBSERVE = frozenset({Role.OBSERVE})
_ADMIN = frozenset({Role.ADMIN})
# Model information and readiness, which all clients query before they send requests.
_ANY = ALL_ROLES

_METHODS = {
    "/midstream.v1.Midstream/": {
        "Generate": _GENERATE,
        "Resume": _GENERATE,
        "Abort": _GENERATE,
        "GetReceipt": _GENERATE,
        "ListReceiptKeys": _ANY,
        "Embed": _GENERATE,
        "GetModelInfo": _ANY,
        "GetServerInfo": _OBSERVE,
        "GetLoads": _OBSERVE,
        "GetIterationStats": _OBSERVE,
        "GetRequestStats": _GENERATE,
        "GetStatus": _OBSERVE,
        "ListLoras": _ANY,
        "LoadLora": _ADMIN,
        "UnloadLora": _ADMIN,
        "SubscribeKvEvents": _ADMIN,
        "GetWeightsVersion": _ANY,
        "UpdateWeights": _ADMIN,
        "PauseGeneration": _ADMIN,
        "ResumeGeneration": _ADMIN,
        "Sleep": _ADMIN,
        "WakeUp": _ADMIN,
    },
    "/inference.GRPCInferenceService/": {
        "ServerLive": _ANY,
        "ServerReady": _ANY,
        "ModelReady": _ANY,
        "ServerMetadata": _ANY,
        "ModelMetadata": _ANY,
        "ModelConfig": _ANY,
        "ModelInfer": _GENERATE,
        "ModelStreamInfer": _GENERATE,
        "ModelStatistics": _OBSERVE,
    },
    "/openengine.v1.Inference/": {"Generate": _GENERATE},
    "/openengine.v1.Control/": {
        "GetModelInfo": _ANY,
        "Health": _ANY,
        "GetServerInfo": _OBSERVE,
        "GetLoad": _OBSERVE,
        "Abort": _GENERATE,
        "LoadLora": _ADMIN,
        "UnloadLora": _ADMIN,
        "ListLoras": _ANY,
        "GetKvEventSources": _ADMIN,
        "SubscribeKvEvents": _ADMIN,
    },
    "/grpc.reflection.v1alpha.ServerReflection/": {"ServerReflectionInfo": _ANY},
}
_GRPC = {prefix + name: roles for prefix, methods in _METHODS.items() for name, roles in methods.items()}
# Beginnings of the paths in router/protocols/live_weights.py.
LIVE_WEIGHTS = (
    "/pause", "/resume", "/is_paused", "/continue_generation", "/abort_request", "/reset_prefix_cache", "/flush_cache",
    "/weight_", "/get_weight_version", "/update_weight", "/init_weight", "/start_weight_update",
    "/finish_weight_update", "/destroy_weights_update_group", "/collective_rpc", "/is_sleeping", "/sleep", "/wake_up",
    "/release_memory_occupation",
)  # fmt: skip
_HTTP = (
    ("/v1/models", _ANY),
    ("/v1/receipts/keys", _ANY),
    ("/openapi.json", _ANY),
    ("/version", _ANY),
    ("/v1/", _GENERATE),
    ("/score", _GENERATE),
    ("/rerank", _GENERATE),
    ("/classify", _GENERATE),
    ("/v2/rerank", _GENERATE),
    ("/v2/models/", _GENERATE),
    ("/v2", _ANY),
    ("/tokenize", _GENERATE),
    ("/detokenize", _GENERATE),
    ("/metrics", _OBSERVE),
    ("/dashboard/feed", _OBSERVE),
    ("/ledger", _ADMIN),
    *((prefix, _ADMIN) for prefix in LIVE_WEIGHTS),
)


def roles_for_method(method: str) -> frozenset[Role]:
    """Return the roles that may call a gRPC method (any one of them suffices); unlisted methods require admin."""
    return _GRPC.get(method, _ADMIN)


def roles_for_path(path: str) -> frozenset[Role]:
    """Return the roles that may use an HTTP path (any one of them suffices); unlisted paths require admin."""
    return next((roles for prefix, roles in _HTTP if path.startswith(prefix)), _ADMIN)


def parse_roles(text: str, field: str) -> frozenset[Role]:
    """Return the roles in a comma-separated list. Raises ConfigError if a role is unknown, or the list is empty."""
    names = [name.strip() for name in text.split(",")]
    try:
        roles = frozenset(Role(name) for name in names)
    except ValueError:
        raise ConfigError(f"{text!r} must be a list of generate, observe and admin", field=field) from None
    return ALL_ROLES if Role.ADMIN in roles else roles


def name_roles(roles: Iterable[Role]) -> str:
    """Format roles for an error message."""
    return " or ".join(role for role in Role if role in frozenset(roles))
