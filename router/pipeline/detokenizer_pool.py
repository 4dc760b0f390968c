"""The detokenizers that this router uses, with one stream to each.

Each request is attached to the one with the fewest streams, among those with the router's own tokenizer. While services
are upgraded, a request that another router accepted may have begun with another tokenizer: then the scheduler refuses
these detokenizers, and the request is attached to one with a tokenizer that was not refused.

When a detokenizer dies, its ClientStreams fail with UNAVAILABLE, and the tasks that read them attach them to another
detokenizer at the offsets reached.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable

import grpc.aio

from midstream.chunk import Chunk
from midstream.errors import UnavailableError, from_proto
from midstream.rpc.discovery import Discovery
from midstream.rpc.frame_link import FrameLink, LinkSettings
from protos import detokenizer_pb2 as pb
from protos import detokenizer_pb2_grpc
from protos.frames_pb2 import FramesOffer, OpenFramesRequest
from router.pipeline.streams import ClientStream

_CONNECT_TIMEOUT_S = 2.0
_REFUSAL_S = 0.5
# A detokenizer responds within milliseconds, so a stalled one is replaced quickly.
_SILENCE_S = 3.0


class DetokenizerLink(FrameLink[pb.StreamCommand, pb.StreamBatch]):
    """The stream to one detokenizer; requests can be attached while it is open.

    Attributes:
        tokenizer_fingerprint: Identifies its tokenizer; None until the first batch has arrived.
        refuses_until: Loop time until which this detokenizer is used only as a last resort.
    """

    message_class = pb.StreamBatch

    def __init__(
        self,
        target: str,
        settings: LinkSettings,
        server_name: str,
        on_live: asyncio.Event,
        count_tokens: Callable[[int], None],
    ) -> None:
        super().__init__("detokenizer", target, settings, server_name, _SILENCE_S)
        self.streams: dict[int, ClientStream] = {}
        self.refuses_until = 0.0
        self.tokenizer_fingerprint: str | None = None
        self._on_live = on_live
        self._count_tokens = count_tokens
        self._numbers = itertools.count(1)

    def attach(self, stream: ClientStream) -> int:
        """Attach a request at the offsets of `stream`; return the stream number, which `detach` takes."""
        number = next(self._numbers)
        self.streams[number] = stream
        attach = pb.StreamAttach(
            stream=number,
            request_id=stream.request_id,
            from_token=stream.from_token,
            from_token_by_sequence=stream.offsets,
            scheduler=stream.scheduler,
        )
        self._send(pb.StreamCommand(attach=attach))
        return number

    def detach(self, number: int) -> None:
        if self.streams.pop(number, None) is not None and self.is_open:
            self._send(pb.StreamCommand(detach=pb.StreamDetach(stream=number)))

    def _ask_for_frames(self, channel: grpc.aio.Channel) -> Awaitable[FramesOffer]:
        stub: detokenizer_pb2_grpc.DetokenizerAsyncStub = detokenizer_pb2_grpc.DetokenizerStub(channel)  # type: ignore[assignment]
        return stub.OpenStream(OpenFramesRequest(), timeout=_CONNECT_TIMEOUT_S)

    @property
    def is_live(self) -> bool:
        """Whether requests can be attached."""
        return self.is_open and self.tokenizer_fingerprint is not None

    def _greet(self) -> None:
        self._on_live.set()  # the first batch may have been read together with the welcome

    def _take(self, batch: pb.StreamBatch) -> None:
        if self.tokenizer_fingerprint is None:
            self.tokenizer_fingerprint = batch.tokenizer_fingerprint
            self._on_live.set()
        streams = self.streams
        self._count_held(batch.progress)
        for item in batch.chunks:
            stream = streams.get(item.stream)
            if stream is None:
                continue
            if item.is_plain:
                stream.push(Chunk.from_proto(item.response, is_plain=True))
            elif item.HasField("response"):
                chunk = Chunk.from_proto(item.response)
                if chunk.is_final:
                    del streams[item.stream]
                stream.push(chunk)
            else:
                del streams[item.stream]
                error = from_proto(item.error)
                if error.field == "tokenizer_fingerprint":
                    stream.foreign_tokenizers.add(self.tokenizer_fingerprint)
                elif isinstance(error, UnavailableError):
                    # The detokenizer is draining or has lost its scheduler: prefer others for a while.
                    self.refuses_until = asyncio.get_running_loop().time() + _REFUSAL_S
                stream.fail(error)

    def _count_held(self, progress: Iterable[pb.StreamProgress]) -> None:
        for item in progress:
            if (stream := self.streams.get(item.stream)) is not None:
                self._count_tokens(stream.count_held(item.num_held_tokens))

    def _lose(self) -> None:
        self.tokenizer_fingerprint = None
        lost, self.streams = self.streams, {}
        for stream in lost.values():
            stream.fail(UnavailableError(f"the detokenizer at {self.target} was lost"))


class Attachment:
    """The detokenizer to which a ClientStream is attached."""

    __slots__ = ("_number", "link")

    def __init__(self, link: DetokenizerLink, number: int) -> None:
        self.link = link
        self._number = number

    def detach(self) -> None:
        """Detach the stream; no effect if it has ended."""
        self.link.detach(self._number)


class DetokenizerPool:
    """All discovered detokenizers.

    Attributes:
        count_tokens: Called with the number of tokens that were computed for answers sent as a whole. Set it before
            `run`.
    """

    def __init__(
        self,
        targets: str,
        settings: LinkSettings,
        tokenizer_fingerprint: str,
        count_tokens: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.count_tokens = count_tokens
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self.links: dict[str, DetokenizerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = asyncio.TaskGroup()
        self._settings = settings
        self._live = asyncio.Event()
        self._turn = 0
        self._discovery = Discovery(targets, field="detokenizers", on_change=self._set_targets)

    @property
    def num_live(self) -> int:
        """Number of detokenizers for requests of this router."""
        return len(self._live_links(frozenset()))

    def _live_links(self, foreign: Collection[str]) -> list[DetokenizerLink]:
        """Return the live links with this router's tokenizer, or with any that is not in `foreign` if this router's is.

        If none is left, a request that began with another tokenizer waits for a detokenizer with that one.
        """
        own = self._tokenizer_fingerprint
        return [
            link
            for link in self.links.values()
            if link.is_live
            and (link.tokenizer_fingerprint not in foreign if own in foreign else link.tokenizer_fingerprint == own)
        ]

    async def run(self) -> None:
        """Keep the links connected until cancelled."""
        async with self._running:  # an error in one task ends all tasks
            try:
                await self._discovery.run()
                await asyncio.Event().wait()
            finally:
                for task in self._tasks.values():  # in order, so that a simulation is reproducible
                    task.cancel()

    async def attach(self, stream: ClientStream, *, avoid: DetokenizerLink | None = None) -> Attachment:
        """Attach to the live detokenizer with the fewest streams; wait until there is one.

        Args:
            stream: The stream; it is attached at the offsets that it has reached.
            avoid: A detokenizer to use only if there is no other.
        """
        while (attachment := self.attach_now(stream, avoid=avoid)) is None:
            self._live.clear()
            await self._live.wait()
        return attachment

    def attach_now(self, stream: ClientStream, *, avoid: DetokenizerLink | None = None) -> Attachment | None:
        """Do what `attach` does, but return None if no detokenizer is live."""
        live = self._live_links(stream.foreign_tokenizers)
        if not live:
            return None
        link = live[0]
        if len(live) > 1:
            now = asyncio.get_running_loop().time()
            live = [link for link in live if link is not avoid and link.refuses_until <= now] or live
            # Take turns among detokenizers with equally many streams.
            self._turn += 1
            start = self._turn % len(live)
            link = min(live[start:] + live[:start], key=lambda link: len(link.streams))
        return Attachment(link, link.attach(stream))

    def _set_targets(self, targets: list[str]) -> None:
        for target in [target for target in self.links if target not in targets]:
            # The streams of the removed link fail when its task ends.
            del self.links[target]
            self._tasks.pop(target).cancel()
        for target in targets:
            if target not in self.links:
                name = self._discovery.name_of(target)
                link = DetokenizerLink(target, self._settings, name, self._live, self.count_tokens)
                self.links[target] = link
                self._tasks[target] = self._running.create_task(link.run(), name=f"detokenizer-{target}")
