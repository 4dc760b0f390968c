"""Logits post-processors that are functions of the process which has started this worker: each call goes to its socket
(see midstream/executor/post_processor_server.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.post_processors import BatchedLogitsPostProcessor
from midstream.errors import ExecutionError


class ClientPostProcessor(BatchedLogitsPostProcessor):
    """Sends the logits of all sequences to the function and receives the new ones."""

    def __init__(self, name: str, socket: str) -> None:
        """Store the function's name and the path of the socket, to which the first call connects."""
        self._name, self._socket = name, socket
        self._connection: Connection | None = None

    def process(
        self, logits: Tensor, tokens: Sequence[NDArray[np.int32]], client_ids: Sequence[str], request_ids: Sequence[str]
    ) -> Tensor:
        """Return the function's logits.

        Raises:
            ExecutionError: The function raised an exception.
            OSError: The process does not exist any more.
        """
        header = {
            "name": self._name,
            "request_ids": list(request_ids),
            "tokens": [known.tolist() for known in tokens],
            "shape": list(logits.shape),
        }
        if self._connection is None:
            self._connection = Client(self._socket, "AF_UNIX")
        try:
            self._connection.send_bytes(json.dumps(header).encode())
            self._connection.send_bytes(logits.cpu().numpy().tobytes())
            error = json.loads(self._connection.recv_bytes())["error"]
            changed = b"" if error else self._connection.recv_bytes()
        except (OSError, EOFError):
            self._connection = None
            raise
        if error:
            raise ExecutionError(error)
        return torch.frombuffer(bytearray(changed), dtype=torch.float32).reshape(logits.shape).to(logits.device)
