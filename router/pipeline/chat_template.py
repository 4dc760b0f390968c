"""Renders a model's chat template: untrusted Jinja from the model folder.

It runs in separate processes (template_renderer.py) with a memory limit and without access to files or the network. A
process that times out or dies is replaced; its conversation is rejected, and no other is affected.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from midstream.errors import ConfigError, InvalidArgumentError
from midstream.python_process import bare_environment, python_command
from router.pipeline.template_renderer import CPU_LIMIT_S, LENGTH, MAX_OUTPUT_CHARACTERS

# Time limit for a process that blocks without computing; its CPU time has a separate limit.
_WALL_LIMIT_S = 20.0
_MAX_TEMPLATE_CHARACTERS = 1 << 20
_MAX_ANSWER_BYTES = 12 * MAX_OUTPUT_CHARACTERS


class _BrokenError(Exception):
    """The process died, or was killed after a timeout."""


class ChatTemplate:
    """A chat template and the processes that render it; it is thread-safe, and each thread uses one process."""

    def __init__(self, source: str, tokens: Mapping[str, str], num_processes: int = 1) -> None:
        """Compile the template.

        Args:
            source: The template, in Jinja.
            tokens: Variables such as `bos_token` that templates expect.
            num_processes: Number of conversations rendered concurrently.

        Raises:
            ConfigError: The template does not compile.
        """
        if len(source) > _MAX_TEMPLATE_CHARACTERS:
            raise ConfigError("the chat template is too large", field="model")
        self._source = source
        self._tokens = dict(tokens)
        # None stands for a process that is started on demand.
        self._processes: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(num_processes - 1):
            self._processes.put(None)
        try:
            self._processes.put(_Process(source))
        except _BrokenError as error:
            raise ConfigError(f"the chat template {error}", field="model") from None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of a conversation; blocks until a process is free. Raises InvalidArgumentError if the
        template rejects the conversation, fails, or exceeds its limits.
        """
        # Templates may test whether `documents` is None, which transformers passes if there are none.
        values: dict[str, object] = {"documents": None, **self._tokens, **(variables or {})}
        values.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        process = self._processes.get()
        try:
            if process is None:
                process = _Process(self._source)
            answer = process.ask(values)
        except _BrokenError as error:
            if process is not None:
                process.close()
            process = None
            raise InvalidArgumentError(f"the model's chat template {error}", field="chat") from None
        finally:
            self._processes.put(process)
        if "error" in answer:
            raise InvalidArgumentError(f"the model's chat template {answer['error']}", field="chat")
        return answer["text"]

    def close(self) -> None:
        """Stop the idle processes."""
        with contextlib.suppress(queue.Empty):
            while True:
                process = self._processes.get_nowait()
                if process is not None:
                    process.close()


class _Process:
    """A renderer process; it is not thread-safe."""

    def __init__(self, source: str) -> None:
        """Start the process and compile `source`. Raises _BrokenError if one of the two fails."""
        # The process does not inherit this process's environment, which may hold keys and tokens.
        environment = bare_environment()
        self._process = subprocess.Popen(
            python_command("router.pipeline.template_renderer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        try:
            answer = self.ask({"source": source})
            if "error" in answer:
                raise _BrokenError(answer["error"])
        except BaseException:
            self.close()
            raise

    def ask(self, message: Mapping[str, object]) -> dict[str, str]:
        """Send a message and return the answer. Raises _BrokenError if the process did not answer; the caller must
        close it.
        """
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        give_up_at = time.monotonic() + _WALL_LIMIT_S
        try:
            view = memoryview(LENGTH.pack(len(body)) + body)
            while view:
                view = view[self._process.stdin.write(view) :]
            (size,) = LENGTH.unpack(self._read(LENGTH.size, give_up_at))
            if size > _MAX_ANSWER_BYTES:
                raise _BrokenError("produces too much output")
            answer: dict[str, str] = json.loads(self._read(size, give_up_at))
        except BrokenPipeError:
            raise _BrokenError(self._end()) from None
        return answer

    def _read(self, size: int, give_up_at: float) -> bytes:
        assert self._process.stdout is not None
        data = bytearray()
        while len(data) < size:
            ready, _, _ = select.select([self._process.stdout], [], [], max(give_up_at - time.monotonic(), 0))
            if not ready:
                raise _BrokenError("does not answer")
            part = os.read(self._process.stdout.fileno(), size - len(data))
            if not part:
                raise _BrokenError(self._end())
            data += part
        return bytes(data)

    def _end(self) -> str:
        """Return the reason why the process ended."""
        if self._process.wait() == -signal.SIGPROF:
            return f"takes longer than {CPU_LIMIT_S:g} s"
        return "crashed its process"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
