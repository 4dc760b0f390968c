"""`midstream demo --kill`: kill one process after another while answers stream, and compare every token.

1. Each prompt is answered once without kills; these token ids are the reference.
2. A few streams answer the same prompts again and again. Meanwhile processes are killed (SIGKILL), one kind after
   another; the next kill waits until every process is ready again.
3. Each finished answer is compared with its reference. The exit status is 1 unless all answers are identical.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from midstream.chunk import Chunk
from midstream.cli.pace import Pace
from midstream.cli.run_dir import ProcessPhase, ProcessState, RunState
from midstream.errors import MidstreamError

# (prompt, temperature). Sampled answers are reproducible too, because the seed is fixed.
PROMPTS = (
    ("What is the capital of France, and what is it known for?", 0.0),
    ("Tell a very short story about a lighthouse keeper.", 0.8),
    ("Write a Python function that reverses a string.", 0.0),
    ("Explain to a child why the sky is blue.", 0.8),
    ("Give three tips for a good night's sleep.", 0.0),
    ("Describe a walk through a forest in autumn.", 0.8),
)
KINDS = ("gpu_worker", "scheduler", "detokenizer", "router")
MAX_TOKENS = 128
NUM_STREAMS = 4
SEED = 7
_SETTLE_S = 1.0

Generate = Callable[[str, float], AsyncIterator[Chunk]]


@dataclass(slots=True)
class Answer:
    """The answer of one stream to one prompt.

    Attributes:
        is_identical: Whether tokens and text equal those of the reference; None until the answer ends.
    """

    number: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    is_identical: bool | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number][0]


@dataclass(slots=True)
class Kill:
    """One kill of a process; times are in seconds of the monotonic clock.

    Attributes:
        longest_gap_s: Longest time without output on any stream that was open during the kill.
    """

    name: str
    kind: str
    killed_s: float
    back_s: float | None = None
    longest_gap_s: float = 0.0


class KillDemo:
    """Run streams while processes are killed, and compare the answers.

    Attributes:
        current: The answer in progress on each stream.
    """

    def __init__(
        self,
        generate: Generate,
        state: Callable[[], RunState],
        state_changed: asyncio.Event,
        *,
        num_kills: int,
        changed: Callable[[str], None],
        settle_s: float = _SETTLE_S,
    ) -> None:
        """Create the demo; nothing is started yet.

        Args:
            generate: Answers a prompt at a temperature; survives the loss of a router.
            settle_s: Pause before each kill, and after the last.
            changed: Called with a line for the log, or with an empty string when only text has grown.
        """
        self.current: list[Answer] = []
        self.kills: list[Kill] = []
        self.num_kills = num_kills
        self.num_identical = 0
        self.differences: list[str] = []
        self._generate = generate
        self._state = state
        self._state_changed = state_changed
        self._changed = changed
        self._references: list[Answer] = []
        self._settle_s = settle_s
        self._is_over = False

    async def run(self) -> bool:
        """Run both phases; return whether every answer was identical and every kill was made. Raises MidstreamError if
        a request failed before anything was killed.
        """
        self._changed("answers without kills")
        self._references = self.current = [Answer(number) for number in range(len(PROMPTS))]
        async with asyncio.TaskGroup() as group:
            for reference in self._references:
                group.create_task(self._stream(reference))
        self._changed(f"{len(self._references)} answers; now with kills")
        numbers = itertools.cycle(range(len(PROMPTS)))
        self.current = [Answer(next(numbers)) for _ in range(NUM_STREAMS)]
        async with asyncio.TaskGroup() as group:
            for slot in range(NUM_STREAMS):
                group.create_task(self._answer_until_over(slot, numbers))
            group.create_task(self._kill_all())
        return not self.differences and len(self.kills) == self.num_kills

    @property
    def num_answers(self) -> int:
        """Number of finished answers, not counting the references."""
        return self.num_identical + len(self.differences)

    def longest_gaps(self) -> dict[str, float]:
        """Longest gap of any stream, in seconds, by kind of the killed process."""
        gaps: dict[str, float] = {}
        for kill in self.kills:
            gaps[kill.kind] = max(gaps.get(kill.kind, 0.0), kill.longest_gap_s)
        return gaps

    async def _answer_until_over(self, slot: int, numbers: Iterator[int]) -> None:
        while True:
            answer = self.current[slot]
            error = ""
            try:
                await self._stream(answer)
            except MidstreamError as failure:
                error = str(failure)
            self._compare(answer, error)
            if self._is_over:
                return
            self.current[slot] = Answer(next(numbers))

    async def _stream(self, answer: Answer) -> None:
        prompt, temperature = PROMPTS[answer.number]
        last_s = time.monotonic()
        async for chunk in self._generate(prompt, temperature):
            now_s = time.monotonic()
            self._note_gap(last_s, now_s)
            last_s = now_s
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            answer.pace.note(chunk)
            self._changed("")

    def _note_gap(self, last_s: float, now_s: float) -> None:
        for kill in self.kills:
            if last_s < kill.killed_s <= now_s:
                kill.longest_gap_s = max(kill.longest_gap_s, now_s - last_s)

    def _compare(self, answer: Answer, error: str) -> None:
        reference = self._references[answer.number]
        answer.is_identical = not error and (answer.token_ids, answer.text) == (reference.token_ids, reference.text)
        if answer.is_identical:
            self.num_identical += 1
            self._changed("")
            return
        position = _first_difference(answer.token_ids, reference.token_ids)
        what = (
            error
            or f"{len(answer.token_ids)} tokens instead of {len(reference.token_ids)}; the first {position} are equal"
        )
        self.differences.append(f"{answer.prompt!r}: {what}")
        self._changed(f"DIFFERENT {self.differences[-1]}")

    async def _kill_all(self) -> None:
        try:
            for number in range(self.num_kills):
                await asyncio.sleep(self._settle_s)
                await self._until(self._are_all_ready)
                kind = KINDS[number % len(KINDS)]
                parts = self._state().of_kind(kind)
                await self._kill(parts[number // len(KINDS) % len(parts)])
            await asyncio.sleep(self._settle_s)
        finally:
            self._is_over = True

    async def _kill(self, part: ProcessState) -> None:
        kill = Kill(part.name, part.kind, time.monotonic())
        self.kills.append(kill)
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGKILL)
        self._changed(f"killed {part.name} ({part.pid})")
        # Wait for the other processes' health too: a process that cannot reach the killed one is not ready.
        await self._until(lambda: self._are_all_ready() and self._is_restarted(part))
        kill.back_s = time.monotonic()
        self._changed(f"{part.name} is ready again after {kill.back_s - kill.killed_s:.1f} s")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._state_changed.clear()
            await self._state_changed.wait()

    def _are_all_ready(self) -> bool:
        return all(process.phase is ProcessPhase.READY for process in self._state().processes)

    def _is_restarted(self, killed: ProcessState) -> bool:
        return any(process.name == killed.name and process.pid != killed.pid for process in self._state().processes)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
