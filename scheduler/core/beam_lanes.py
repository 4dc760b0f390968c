"""Beams on their way: the sequences that run a beam search, one lane for each beam.

A beam's next token is chosen here, not by the worker, so its lane rests until all lanes have brought candidates. Then
each beam that goes on takes a lane: the first child of a beam stays in its lane, further ones fork into lanes whose
beam was dropped. The fork happens with the next step that runs the request (fork_beams, BlockTables.fork): full blocks
are shared, the last, partly filled one is copied. When the request is paused before, nothing is lost: it starts again
from the tokens of its beams.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as TypingSequence

from scheduler.core.beams import BeamSearch, BeamStep, Candidate
from scheduler.core.request import FinishReason, Request, Sequence, SequenceEnd
from scheduler.core.request_spec import RequestSpec


class BeamLanes:
    """The lanes of one request.

    Attributes:
        search: The state of its search.
        lanes: As many as the search is wide: those of the beams that go on, by rank, then spare ones.
        forks: (from, to) that are to be carried out before a lane runs again.
        has_news: The worker has not been told the lanes' last tokens.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.search = BeamSearch(request.spec)
        self.lanes = [Sequence(request, index) for index in range(request.spec.beam_width)]
        self.forks: list[tuple[Sequence, Sequence]] = []
        self.has_news = False
        self._candidates: dict[Sequence, TypingSequence[Candidate]] = {}
        self._reports: dict[Sequence, list[bytes]] = {}

    @property
    def running(self) -> TypingSequence[Sequence]:
        """Lanes of the beams that go on, by rank."""
        return self.lanes[: len(self.search.running)]

    @property
    def spare(self) -> TypingSequence[Sequence]:
        """Lanes without a beam."""
        return self.lanes[len(self.search.running) :]

    def restore(self, steps: TypingSequence[BeamStep]) -> None:
        """Takes the steps of a journal. Precondition: no lane is placed.

        A search that is over, but whose outputs were not kept, takes its last step again.
        """
        self.search = _search(self.search.spec, steps)
        if self.search.is_over:
            self.search = _search(self.search.spec, steps[:-1])
        self._take_tokens()
        self._forget_prompt()

    def forget_placement(self) -> None:
        """The lanes were taken off their worker: what had come in is computed anew."""
        self._forget_prompt()
        self.forks.clear()
        self.has_news = False
        self._candidates.clear()
        self._reports.clear()

    def _forget_prompt(self) -> None:
        if not self.search.steps:
            self._request.sequences[0].outputs = []  # what was reported of the prompt so far comes again

    def report(self, lane: Sequence, data: bytes) -> None:
        """Take in what the worker says beside the candidates of a lane: a serialized RowOutputs."""
        self._reports.setdefault(lane, []).append(data)

    def take(self, lane: Sequence, candidates: TypingSequence[Candidate]) -> bool:
        """Takes in what a lane may go on with; True once all have brought theirs."""
        self._candidates[lane] = candidates
        return len(self._candidates) == len(self.search.running)

    def advance(self) -> None:
        """Takes the search's next step, and gives each beam a lane. Precondition: all candidates are in."""
        reports = tuple(tuple(self._reports.get(lane, ())) for lane in self.running) if self._reports else ()
        step = self.search.choose([self._candidates[lane] for lane in self.running], reports)
        self._candidates.clear()
        self._reports.clear()
        parents = self.search.apply(step)
        stays = {self.lanes[parent]: rank for rank, parent in reversed(list(enumerate(parents)))}
        free = iter([lane for lane in self.lanes if lane not in stays])
        chosen = []
        for rank, parent in enumerate(parents):
            source = self.lanes[parent]
            lane = source if stays[source] == rank else next(free)
            if lane is not source:
                self.forks.append((source, lane))
                lane.block_hashes = source.block_hashes[:]
            chosen.append(lane)
        self.lanes = [*chosen, *free]
        self.has_news = True
        self._take_tokens()

    def _take_tokens(self) -> None:
        for lane, beam in zip(self.running, self.search.running, strict=True):
            lane.output = beam.tokens

    def ends(self, num_sequences: int) -> list[tuple[array[int], SequenceEnd]]:
        """Outputs and ends of a search that is over, best first; where fewer beams have ended, empty ones."""
        found: list[tuple[array[int], SequenceEnd]] = []
        for item in self.search.ended[:num_sequences]:
            reason = FinishReason.LENGTH if item.stop_token_id is None else FinishReason.STOP
            end = SequenceEnd(reason, len(item.beam.tokens), stop_token_id=item.stop_token_id)
            end.cumulative_log_prob = item.beam.cumulative
            found.append((item.beam.tokens, end))
        missing = num_sequences - len(found)
        return found + [(array("I"), SequenceEnd(FinishReason.STOP, 0)) for _ in range(missing)]


def _search(spec: RequestSpec, steps: TypingSequence[BeamStep]) -> BeamSearch:
    search = BeamSearch(spec)
    for step in steps:
        search.apply(step)
    return search
