"""Checks guides before their requests are scheduled, in an isolated process with time and memory limits.

A guide that does not compile within the limits is the client's error. Results of the most recent guides are cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from midstream.errors import InvalidArgumentError, OverloadedError, UnsupportedError
from midstream.grammar.messages import Guide
from midstream.grammar.process import LIMIT_S, GrammarProcess, TokenizerError, guide_of, is_available
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.fair_threads import FairThreads
from router.pipeline.output_checks import Constraints

MAX_CHECKED = 1024
# Maximum number of waiting guides, in total and per client.
MAX_WAITING, MAX_WAITING_PER_CLIENT = 256, 64
_FIELD = "guided_decoding.guide"


class GrammarChecker:
    """Checks guides one at a time, and takes them from each client in turn; the process starts with the first guide."""

    def __init__(self, folder: ModelFolder, *, limit_s: float = LIMIT_S) -> None:
        self._folder = folder
        self._limit_s = limit_s
        self._process: GrammarProcess | None = None
        self._thread = FairThreads(1, "grammar", max_waiting_per_client=MAX_WAITING_PER_CLIENT)
        self._checked: OrderedDict[Guide, str] = OrderedDict()
        self._pending: dict[Guide, asyncio.Task[str]] = {}

    @property
    def num_checked(self) -> int:
        """Number of cached results."""
        return len(self._checked)

    def close(self) -> None:
        """Stop the thread and the process."""
        self._thread.close()
        self._drop()

    async def check(self, config: pb.GuidedDecodingConfig, constraints: Constraints | None = None) -> None:
        """Check that the guide compiles.

        Args:
            config: The guide; parts that do not compile are left out of it if they may be.
            constraints: Where the guide comes from; if a part of it does not compile, the error names its field.

        Raises:
            InvalidArgumentError: The guide does not compile within the limits.
            OverloadedError: Too many guides are waiting.
            UnsupportedError: The grammar library is not installed, or cannot read the model's tokenizer.
        """
        problem = await self._problem(config)
        if not problem:
            return
        parts = constraints.guide_parts() if constraints is not None else {}
        problems = {field: found for field, part in parts.items() if (found := await self._problem(part))}
        if constraints is not None and problems and constraints.leave_out(problems.keys()):
            problems = {}
            problem = await self._problem(config)
        if problems:
            field, problem = next(iter(problems.items()))
            raise InvalidArgumentError(problem, field=field)
        if problem:
            raise InvalidArgumentError(problem, field=_FIELD)

    async def _problem(self, config: pb.GuidedDecodingConfig) -> str:
        """Return the error in a guide; empty if it is valid."""
        guide = guide_of(config)
        problem = self._checked.get(guide)
        if problem is None:
            if not is_available():
                raise UnsupportedError("the grammar library is not installed on this router", field="guided_decoding")
            # Requests with the same guide share one check, which continues if their callers leave.
            problem = await asyncio.shield(self._pending.get(guide) or self._begin(guide))
        if guide in self._checked:
            self._checked.move_to_end(guide)
        return problem

    def _begin(self, guide: Guide) -> asyncio.Task[str]:
        if self._thread.num_waiting >= MAX_WAITING:
            raise OverloadedError("too many grammars are waiting to be checked", field=_FIELD)
        check = asyncio.create_task(self._thread.run(lambda: self._check(guide)))
        self._pending[guide] = check
        check.add_done_callback(lambda _: self._end(guide, check))
        return check

    def _end(self, guide: Guide, check: asyncio.Task[str]) -> None:
        del self._pending[guide]
        if check.cancelled() or check.exception() is not None:
            return
        self._checked[guide] = check.result()
        if len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)

    def _check(self, guide: Guide) -> str:
        try:
            if self._process is None:
                self._process = GrammarProcess(self._folder, limit_s=self._limit_s)
            return self._process.check(guide)
        except TokenizerError as error:
            self._drop()
            raise UnsupportedError(
                f"the grammar library cannot read the model's tokenizer ({error})", field="guided_decoding"
            ) from None
        except OSError:
            is_overrun = self._process is not None and self._process.was_overrun()
            self._drop()
            if is_overrun:
                return f"takes more than {self._limit_s:g} s to compile"
            return "needs too much memory to compile, or the grammar library cannot process it"

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
