"""Checks guides before their requests are scheduled, in an isolated process with time and memory limits.

A guide that does not compile within the limits is the client's error. Results of the most recent guides are cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from midstream.errors import InvalidArgumentError, OverloadedError, UnsupportedError
from midstream.grammar.messages import Guide
from midstream.grammar.process import LIMIT_S, GrammarProcess, is_available
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb

MAX_CHECKED = 1024
MAX_WAITING = 64
_FIELD = "guided_decoding.guide"
KINDS = {
    pb.GUIDE_TYPE_JSON: "json",
    pb.GUIDE_TYPE_JSON_SCHEMA: "json_schema",
    pb.GUIDE_TYPE_REGEX: "regex",
    pb.GUIDE_TYPE_EBNF_GRAMMAR: "ebnf",
}


class GrammarChecker:
    """Checks guides one at a time; the process is started for the first one.

    Attributes:
        num_checked: Number of cached results.
    """

    def __init__(self, folder: ModelFolder, *, limit_s: float = LIMIT_S) -> None:
        self._folder = folder
        self._limit_s = limit_s
        self._process: GrammarProcess | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._checked: OrderedDict[Guide, str] = OrderedDict()
        self._num_waiting = 0

    @property
    def num_checked(self) -> int:
        """Number of cached results."""
        return len(self._checked)

    def close(self) -> None:
        """Stop the thread and the process."""
        self._thread.shutdown(cancel_futures=True)
        self._drop()

    async def check(self, config: pb.GuidedDecodingConfig) -> None:
        """Check that the guide compiles.

        Raises:
            InvalidArgumentError: It does not compile within the limits.
            OverloadedError: Too many guides are waiting.
            UnsupportedError: The grammar library is not installed.
        """
        guide = Guide(KINDS[config.guide_type], config.guide)
        problem = self._checked.get(guide)
        if problem is None:
            if not is_available():
                raise UnsupportedError("the grammar library is not installed on this router", field="guided_decoding")
            if self._num_waiting >= MAX_WAITING:
                raise OverloadedError("too many grammars wait to be checked", field=_FIELD)
            self._num_waiting += 1
            try:
                problem = await asyncio.get_running_loop().run_in_executor(self._thread, self._check, guide)
            finally:
                self._num_waiting -= 1
            self._checked[guide] = problem
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        if guide in self._checked:
            self._checked.move_to_end(guide)
        if problem:
            raise InvalidArgumentError(problem, field=_FIELD)

    def _check(self, guide: Guide) -> str:
        try:
            if self._process is None:
                self._process = GrammarProcess(self._folder, limit_s=self._limit_s)
            return self._process.check(guide)
        except OSError:
            self._drop()
            return f"takes more than {self._limit_s:g} s or too much memory to compile"

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
