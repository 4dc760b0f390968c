"""A gRPC server on asyncio that reads and writes HTTP/2 frames itself.

    server = GrpcServer(interceptors=[...])
    add_RouterServicer_to_server(servicer, server)
    port = server.add_port("127.0.0.1", 0)
    await server.start()

A call in order: a `Connection` parses the frames that it reads and creates a `Call` for each HEADERS frame. The
`GrpcServer` takes the connections in turn and starts each call in its own task. A method reads `Messages` and writes to
its `Call`, which is its context. What all calls of a connection write in one iteration of the event loop goes to the
socket at once.
"""

from __future__ import annotations

from midstream.rpc.http2.limits import Limits
from midstream.rpc.http2.server import GrpcServer

__all__ = ["GrpcServer", "Limits"]
