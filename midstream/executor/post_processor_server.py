"""Runs the logits post-processors that are functions of this process, for the workers that its executor has started.

A worker connects to a socket in the services' private folder, and sends for each call its name, the ids and tokens of
the sequences as JSON, and then their logits as little-endian float32. The answer is JSON with an error or null and, if
there is none, the new logits. No code is transferred.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from midstream.errors import InvalidArgumentError
from midstream.executor.request import BATCHED_POST_PROCESSOR_NAME, DYNAMIC_POST_PROCESSOR_NAME
from midstream.executor.tensors import to_user, values_of
from midstream.extras import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a function for one request.

    Attributes:
        request_id: The executor's id of the request.
        client_id: The client's id.
        is_beam_search: Whether all its rows are beams, which the function gets together.
        function: The request's own function, if it has one.
    """

    request_id: int
    client_id: int | str | None
    is_beam_search: bool
    function: object = None


# Returns the arguments for the service's id of a request.
FindCall = Callable[[str], Call]


class PostProcessorServer:
    """Answers the workers' calls in threads of its own."""

    def __init__(self, socket: Path, functions: Mapping[str, Callable[..., Any]], find: FindCall) -> None:
        """Start to accept connections.

        Args:
            socket: Path of the Unix socket to create.
            functions: The functions by name.
            find: Returns the request of a call.
        """
        self._functions, self._find = dict(functions), find
        self._listener = Listener(str(socket), "AF_UNIX")
        self._is_closed = False
        threading.Thread(target=self._accept, name="midstream-post-processors", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; those that exist end with their workers."""
        self._is_closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError, EOFError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                header = json.loads(connection.recv_bytes())
                logits = Tensor("logits", "float32", tuple(header["shape"]), connection.recv_bytes())
                try:
                    changed = self._call(header, logits)
                except Exception as error:  # noqa: BLE001 (the user's function)
                    connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
                else:
                    connection.send_bytes(b'{"error": null}')
                    connection.send_bytes(changed)

    def _call(self, header: Mapping[str, Any], logits: Tensor) -> bytes:
        """Call the function once for each request or, if it is for batches, once for all; return all rows."""
        name, wire_ids = header["name"], header["request_ids"]
        calls: list[tuple[Call, list[int]]] = []  # with the rows of each
        for wire_id in dict.fromkeys(wire_ids):
            call = self._find(wire_id)
            rows = [row for row, other in enumerate(wire_ids) if other == wire_id]
            calls += [(call, rows)] if call.is_beam_search else [(call, [row]) for row in rows]
        tokens = [[header["tokens"][row] for row in rows] for _, rows in calls]
        given = [to_user(_rows(logits, rows)) for _, rows in calls]
        if name == BATCHED_POST_PROCESSOR_NAME:
            ids, clients = [call.request_id for call, _ in calls], [call.client_id for call, _ in calls]
            results = self._functions[name](ids, given, tokens, 0, clients) or given
        else:
            results = []
            for (call, _), one, own in zip(calls, given, tokens, strict=True):
                function = call.function if name == DYNAMIC_POST_PROCESSOR_NAME else self._functions[name]
                if not callable(function):
                    raise InvalidArgumentError("the request has no function", field="logits_post_processor")
                changed = function(call.request_id, one, own, 0, call.client_id)
                results.append(one if changed is None else changed)
        row_bytes = len(logits.data) // logits.shape[0]
        changed_rows = bytearray(logits.data)
        for (_, rows), result in zip(calls, results, strict=True):
            data = _bytes_of(result, len(rows) * row_bytes)
            for place, row in enumerate(rows):
                changed_rows[row * row_bytes : (row + 1) * row_bytes] = data[
                    place * row_bytes : (place + 1) * row_bytes
                ]
        return bytes(changed_rows)


def _rows(logits: Tensor, rows: Iterable[int]) -> Tensor:
    """Return the logits of some rows, [1, rows, vocab_size]."""
    row_bytes = len(logits.data) // logits.shape[0]
    data = b"".join(logits.data[row * row_bytes : (row + 1) * row_bytes] for row in rows)
    return Tensor("logits", "float32", (1, len(data) // row_bytes, logits.shape[1]), data)


def _bytes_of(result: Any, num_bytes: int) -> bytes:
    values = result.detach().cpu().numpy() if hasattr(result, "detach") else result
    data = values.astype("<f4").tobytes() if hasattr(values, "astype") else _packed(values_of(values, "logits"))
    if len(data) != num_bytes:
        raise InvalidArgumentError(f"has {len(data)} bytes; must have {num_bytes}, as before", field="logits")
    return data


def _packed(values: Any) -> bytes:
    while isinstance(values[0], list):
        values = [item for row in values for item in row]
    return struct.pack(f"<{len(values)}f", *values)
