"""Read one gRPC stream with `grpcio`."""

import json
import sys

import grpc

asked = json.loads(sys.argv[1])
text, error = "", ""
with grpc.insecure_channel(asked["url"].removeprefix("http://")) as channel:
    call = channel.unary_stream(asked["method"])
    try:
        for message in call(b""):
            text += message.decode()
    except grpc.RpcError as raised:
        error = f"{raised.code().name}: {raised.details()}"
print("RESULT " + json.dumps({"text": text, "error": error}))
