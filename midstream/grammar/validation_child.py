"""The process that validates outputs: `python -m midstream.grammar.validation_child FD MEMORY_BYTES LIMIT_S`.

Each message is a list of parts, each of which is a JSON schema and a JSON text; the response contains the problems of
each part. Schemas are untrusted, and their expressions may take very long: a signal ends the process when a message has
taken more than its processor time.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys

from midstream.grammar.json_schema.validation import problems
from midstream.grammar.messages import READY
from midstream.socket_messages import receive, send


def main() -> None:
    number, memory_bytes, limit_s = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = socket.socket(fileno=int(number))
    send(connection, READY)
    while True:
        try:
            parts, _ = receive(connection)
            assert isinstance(parts, list)
            signal.setitimer(signal.ITIMER_PROF, float(limit_s))
            found = [problems(schema, text) for schema, text in parts]
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(connection, found)
        except OSError:
            break  # the peer has closed the connection


if __name__ == "__main__":
    main()
