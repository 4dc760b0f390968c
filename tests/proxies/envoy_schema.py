"""Read a bootstrap configuration of Envoy strictly: `python envoy_schema.py FILE`, where xds-protos is installed."""

import importlib
import sys
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from google.protobuf import json_format

bootstrap = importlib.import_module("envoy.config.bootstrap.v3.bootstrap_pb2")
# Types that the configuration names in `@type`.
for name in (
    "envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2",
    "envoy.extensions.filters.http.router.v3.router_pb2",
    "envoy.extensions.upstreams.http.v3.http_protocol_options_pb2",
):
    importlib.import_module(name)
found = json_format.ParseDict(yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8")), bootstrap.Bootstrap())
print(len(found.static_resources.listeners), len(found.static_resources.clusters))
