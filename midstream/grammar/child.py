"""The grammar process: `python -m midstream.grammar.child FD MEMORY_BYTES LIMIT_S TOKENIZER_JSON VOCAB_SIZE END_IDS`.

1. A row is opened with its guide. The guide is compiled on a thread, once for all rows that share it; compiled guides
   are kept in an LRU cache.
2. Each message contains new tokens of rows, and the response contains bit masks of the tokens that may follow. If a
   row's guide is still being compiled, the response is `waiting` or, beyond the time limit, `overrun`.
3. The process ends with its connection. A row's state is a function of its guide and tokens, so a killed process can be
   replaced at any time.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance

from midstream.grammar.compile import GuideError, GuideTokenizer, compile_guide, load_tokenizer
from midstream.grammar.messages import OVERRUN, OVERRUN_STATUS, READY, WAITING, Guide
from midstream.socket_messages import receive, send

MAX_COMPILED = 256
_NUM_THREADS = 2
_NICENESS = 10
# Interval at which the processor time of a compilation is checked.
_POLL_S = 0.1
# Maximum delay of a response for guides that are being compiled.
_GRACE_S = 0.01


class _Compilation:
    """The compilation of a guide on one of `threads`.

    Its time limit counts processor time, so that a guide does not exceed it only because the machine is busy.
    """

    def __init__(self, guide: Guide, tokenizer: GuideTokenizer, threads: ThreadPoolExecutor) -> None:
        self._clock_id: int | None = None
        self._began_s = 0.0
        self.future = threads.submit(self._run, guide, tokenizer)

    def _run(self, guide: Guide, tokenizer: GuideTokenizer) -> llguidance.LLMatcher:
        self._began_s = time.thread_time()
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        return compile_guide(guide, tokenizer)

    @property
    def used_s(self) -> float:
        """Processor time that the compilation has used so far, in seconds."""
        return time.clock_gettime(self._clock_id) - self._began_s if self._clock_id is not None else 0.0


@dataclass(slots=True)
class _Row:
    """A sequence: its guide, its end tokens, the tokens that its matcher has not consumed, and whether it has ended."""

    guide: Guide
    end_ids: list[int]
    tokens: list[int]
    matcher: llguidance.LLMatcher | None = None
    has_ended: bool = False


class GrammarServer:
    """The rows, and the compiled guides."""

    def __init__(self, tokenizer: GuideTokenizer, limit_s: float) -> None:
        self._tokenizer = tokenizer
        self._limit_s = limit_s
        self._rows: dict[int, _Row] = {}
        self._compiled: OrderedDict[Guide, _Compilation] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, initializer=_lower_priority)

    @property
    def num_compiled(self) -> int:
        """Number of cached guides."""
        return len(self._compiled)

    def check(self, guide: Guide) -> str:
        """Return the error in a guide; empty if it is valid. Raises TimeoutError if it exceeds the time limit."""
        compilation = _Compilation(guide, self._tokenizer, self._threads)
        while not wait([compilation.future], _POLL_S).done:
            if compilation.used_s > self._limit_s:
                raise TimeoutError
        error = compilation.future.exception()
        if error is not None and not isinstance(error, GuideError):
            raise error
        return "" if error is None else str(error) or "cannot be compiled"

    def masks(self, items: list[dict[str, Any]]) -> tuple[list[str], bytes]:
        """Return READY, WAITING, OVERRUN or an error message for each item, and the masks of READY items in order."""
        deadline = time.monotonic() + _GRACE_S
        for item in items:
            self._note(item)
        states, masks = [], bytearray()
        for item in items:
            row = self._rows[item["row"]]
            state = self._advance(row, deadline) if item["is_sampled"] else READY
            if state == READY and item["is_sampled"]:
                mask = self._mask(row)
                state = self._problem(row)
                masks += mask if state == READY else b""
            states.append(state)
        return states, bytes(masks)

    def _note(self, item: dict[str, Any]) -> None:
        """Open a row, or add new tokens to it."""
        if "guide" in item:
            guide = Guide(*item["guide"])
            self._rows[item["row"]] = _Row(guide, item["end_ids"], item["tokens"])
            self._compilation(guide)
        else:
            self._rows[item["row"]].tokens += item["tokens"]

    def _compilation(self, guide: Guide) -> _Compilation:
        found = self._compiled.get(guide)
        if found is None:
            found = _Compilation(guide, self._tokenizer, self._threads)
            self._compiled[guide] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)[1].future.cancel()
        self._compiled.move_to_end(guide)
        return found

    def _advance(self, row: _Row, deadline: float) -> str:
        """Advance the row's matcher over its new tokens; return the row's status."""
        if row.matcher is None:
            compilation = self._compilation(row.guide)
            try:
                row.matcher = compilation.future.result(max(deadline - time.monotonic(), 0)).deep_copy()
            except TimeoutError:
                return OVERRUN if compilation.used_s > self._limit_s else WAITING
            except GuideError as error:
                return str(error)
        for token in row.tokens:
            if row.has_ended or (token in row.end_ids and row.matcher.is_accepting()):
                row.has_ended = True
            else:
                row.matcher.consume_token(token)
        row.tokens = []
        return self._problem(row)

    def _mask(self, row: _Row) -> bytes:
        """Return a bit mask, lowest bit first, of the tokens that may come next."""
        assert row.matcher is not None
        size = -(-self._tokenizer.library.vocab_size // 8)
        if row.has_ended:
            mask = bytearray(size)
        else:
            mask = bytearray(row.matcher.compute_bitmask()[:size])
            # An end token ends the output, so it must come only where the output may end.
            for token in (*row.end_ids, *(self._tokenizer.library.eos_tokens if row.end_ids else ())):
                mask[token >> 3] &= ~(1 << (token & 7))
        if row.has_ended or row.matcher.is_accepting():
            for token in row.end_ids:
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def _problem(self, row: _Row) -> str:
        assert row.matcher is not None
        is_wrong = row.matcher.is_error() and not row.has_ended
        return row.matcher.get_error().partition("\n")[0] or "no token follows" if is_wrong else READY


def _lower_priority() -> None:
    """Lower the priority of this thread, so that compilation does not slow down the model's threads on a busy
    machine.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def main() -> None:
    number, memory_bytes, limit_s, file, vocab_size, end_ids = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(number))
    ids = [int(item) for item in end_ids.split(",") if item]
    try:
        tokenizer = load_tokenizer(Path(file), int(vocab_size), ids)
    except ValueError as error:
        send(connection, str(error))
        return
    server = GrammarServer(tokenizer, float(limit_s))
    send(connection, READY)
    while True:
        try:
            request, _ = receive(connection)
            assert isinstance(request, dict)
            if "check" in request:
                send(connection, server.check(Guide(*request["check"])))
            else:
                states, masks = server.masks(request["rows"])
                send(connection, states, masks)
        except TimeoutError:
            os._exit(OVERRUN_STATUS)
        except OSError:
            break  # the peer has closed the connection
    os._exit(0)  # do not wait for a guide that is being compiled


if __name__ == "__main__":
    main()
