"""Echoed prompts with log probabilities. These arrive after the prompt's text, and only with the first sequence."""

from __future__ import annotations

from dataclasses import replace

from midstream.chunk import Chunk
from midstream.extras import Extras, LogProbs


class EchoedPrompt:
    """Buffers the sequences of a prompt until its log probabilities are complete, and adds them to each sequence."""

    def __init__(self) -> None:
        self._held: dict[int, Chunk] = {}
        self._rows: LogProbs | None = None
        self._is_complete = False

    def release(self, chunk: Chunk) -> list[Chunk]:
        """Return the chunks that may be sent now that `chunk` has arrived.

        Sequence 0 comes last: a stream that is resumed after output of sequence 0 no longer adds the prompt to the
        others.
        """
        is_first = chunk.sequence_index not in self._held
        if is_first:
            self._held[chunk.sequence_index] = chunk
        if self._is_complete:
            if is_first:
                self._add_prompt(chunk)
            return [chunk]
        held = self._held[chunk.sequence_index]
        if not is_first:
            held.append(chunk)
        has_output = held.is_sequence_final or (held.extras is not None and held.extras.log_probs is not None)
        if not (held.is_final or (held.sequence_index == 0 and has_output)):
            return []
        self._is_complete = True
        first = self._held.get(0)
        self._rows = first.extras.prompt_log_probs if first is not None and first.extras is not None else None
        for item in self._held.values():
            self._add_prompt(item)
        return sorted(self._held.values(), key=lambda item: (item.is_final, -item.sequence_index))

    def _add_prompt(self, chunk: Chunk) -> None:
        chunk.extras = replace(chunk.extras or Extras(), prompt_log_probs=self._rows)
