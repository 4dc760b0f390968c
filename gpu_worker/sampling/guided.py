"""Token masks for sequences that follow a grammar.

The matchers run in a separate process (midstream/grammar), which computes masks while the model computes logits:

1. `ask`, before the forward pass: each sampling row sends its tokens since the last request; the first request also
   contains its guide. Rows that are still in prefill send only the guide, so that it is compiled in the meantime.
2. `answer`, after it: a mask for each row, or an error. A row whose guide is not compiled yet fails as unavailable, so
   that the scheduler retries it and the batch does not wait.

A process that dies or times out is replaced, and rows continue from their tokens. The guides of the rows that it was
processing become suspects, which are tried one at a time; a guide that fails alone is rejected from then on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import IntArray
from gpu_worker.features import Feature
from midstream.errors import InvalidArgumentError, MidstreamError, UnavailableError
from midstream.grammar.messages import OVERRUN, READY, WAITING
from midstream.grammar.process import GrammarProcess

logger = logging.getLogger(__name__)

_MAX_SUSPECTS = 1024
_NOT_READY = UnavailableError("its grammar is still being compiled", field="guided_decoding")
_TOO_MUCH = InvalidArgumentError("takes too much time or memory", field="guided_decoding.guide")


@dataclass(frozen=True, slots=True)
class Constraints:
    """Grammar masks for a step's rows, and the rows that failed.

    Attributes:
        masks: uint8 [bytes] by row, with one bit per token, lowest first, which is set if the token is allowed.
        errors: Errors of rows that cannot continue, by row.
    """

    masks: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    errors: dict[int, MidstreamError] = field(default_factory=dict)


UNCONSTRAINED = Constraints()


class Guides:
    """The sequences in `rows` that follow a grammar. The grammar process starts with the first of them."""

    def __init__(self, rows: Rows, start: Callable[[], GrammarProcess]) -> None:
        self._rows = rows
        self._start = start
        self._process: GrammarProcess | None = None
        self._life = 0
        self._asked: list[int] = []  # rows whose masks are awaited
        self._is_awaited = False  # whether there is a response, with or without masks
        self._errors: dict[int, MidstreamError] = {}
        self._suspects: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # by digest: number of failures of the process while it had this guide

    def close(self) -> None:
        """Stop the grammar process."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def ask(self, sampled: IntArray, others: list[int]) -> bool:
        """Request masks for the sampled rows, and compilation of the other rows' guides; return False if no row has a
        guide.
        """
        features = self._rows.features
        rows = sampled[(features[sampled] & Feature.GUIDED) != 0].tolist()
        ahead = [row for row in others if features[row] & Feature.GUIDED and row not in rows]
        if not rows and not ahead:
            return False
        self._asked, self._errors, self._is_awaited = [], {}, False
        suspects = [row for row in rows if self._strikes(row)]
        if suspects:
            rows, ahead = self._choose(rows, suspects), []
        try:
            self._send(rows, ahead)
        except OSError as error:
            self._lose(rows, error)
        return True

    def answer(self) -> Constraints:
        """Return the masks requested by `ask`."""
        masks: dict[int, NDArray[np.uint8]] = {}
        if self._is_awaited and self._process is not None:
            try:
                states, data = self._process.take_masks()
            except OSError as error:
                self._lose(self._asked, error)
            else:
                self._read(states, np.frombuffer(data, dtype=np.uint8), masks)
        return Constraints(masks, self._errors)

    def _choose(self, rows: list[int], suspects: list[int]) -> list[int]:
        """Return rows whose guides are not suspects or, if none, the rows of one suspect. The others wait or fail."""
        for row in suspects:
            self._errors[row] = _TOO_MUCH if self._strikes(row) > 1 else _NOT_READY
        chosen = [row for row in rows if row not in self._errors]
        if chosen:
            return chosen
        chosen = [row for row in suspects if self._errors[row] is _NOT_READY][:1]
        for row in chosen:
            del self._errors[row]
        return chosen

    def _send(self, rows: list[int], ahead: list[int]) -> None:
        if self._process is None:
            self._process = self._start()
            self._life += 1
        if not rows and not ahead:
            return
        if not self._process.is_ready():
            self._errors |= dict.fromkeys(rows, _NOT_READY)
            return
        items = [self._item(row, is_sampled=True) for row in rows]
        items += [self._item(row, is_sampled=False) for row in ahead if self._is_new(row)]
        if items:
            self._asked = rows
            self._process.ask_masks(items)
            self._is_awaited = True

    def _is_new(self, row: int) -> bool:
        state = self._rows.guides[row]
        return state is not None and state.life != self._life

    def _item(self, row: int, *, is_sampled: bool) -> dict[str, object]:
        state, rows = self._rows.guides[row], self._rows
        assert state is not None
        item: dict[str, object] = {"row": row, "is_sampled": is_sampled}
        if state.life != self._life:
            state.life, state.num_sent = self._life, 0
            item |= {"guide": [state.guide.kind, state.guide.text], "end_ids": list(rows.sampling[row].end_ids)}
        output = rows.tokens[row, rows.prompt_lengths[row] : rows.lengths[row]]
        item["tokens"] = output[state.num_sent :].tolist()
        state.num_sent = len(output)
        return item

    def _read(self, states: list[str], data: NDArray[np.uint8], masks: dict[int, NDArray[np.uint8]]) -> None:
        num_ready = states[: len(self._asked)].count(READY)
        parts = iter(data.reshape(num_ready, -1)) if num_ready else iter(())
        for row, state in zip(self._asked, states, strict=False):
            if state == READY:
                masks[row] = next(parts)
                self._suspects.pop(self._digest(row), None)
            elif state == WAITING:
                self._errors[row] = _NOT_READY
            elif state == OVERRUN:
                self._suspects[self._digest(row)] = 2
                self._errors[row] = _TOO_MUCH
            else:
                self._errors[row] = InvalidArgumentError(state, field="guided_decoding.guide")
        if OVERRUN in states:
            self.close()

    def _lose(self, rows: list[int], error: OSError) -> None:
        logger.warning("the grammar process failed on %d rows: %s", len(rows), error)
        self.close()
        self._is_awaited = False
        self._errors |= dict.fromkeys(rows, _NOT_READY)
        for digest in {self._digest(row) for row in rows}:
            self._suspects[digest] = self._suspects.get(digest, 0) + 1
            self._suspects.move_to_end(digest)
        while len(self._suspects) > _MAX_SUSPECTS:
            self._suspects.popitem(last=False)

    def _strikes(self, row: int) -> int:
        return self._suspects.get(self._digest(row), 0) if self._suspects else 0

    def _digest(self, row: int) -> bytes:
        state = self._rows.guides[row]
        assert state is not None
        return state.digest
