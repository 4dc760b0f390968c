"""Recordings of a core: a file of frames, written by a dedicated thread and read up to its last complete frame.

The engine queues each event with its outcome; the thread encodes all queued events and appends them in one write, so
everything written before the process was killed is in the file. A recording with a gap could not be replayed. If the
disk fails or falls behind by `_MAX_WAITING` events, recording therefore stops, and serving continues.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from midstream.errors import ConfigError
from protos import recording_pb2 as pb
from scheduler.core.effects import Effect
from scheduler.core.events import Event
from scheduler.replay.recording_codec import Outcome, encode_record

logger = logging.getLogger(__name__)

_FRAME_BYTES = 8  # length and CRC-32
_MAX_RECORD_BYTES = 1 << 28
_MAX_WAITING = 20_000
_MAX_EVENTS_PER_WRITE = 256


class Recorder:
    """Writes a recording."""

    def __init__(self, path: Path, started: pb.RecordingStarted, time_ns: int) -> None:
        """Open the file, drop its last frame if that is incomplete, and record the start of a core. Raises ConfigError
        if the file cannot be written, or is not a recording.
        """
        try:
            # Create the file first with `touch`: a recording contains prompts, so only its owner may read it.
            path.touch(mode=0o600)
            with path.open("rb") as file:
                num_bytes = _whole_bytes(file)
            os.truncate(path, num_bytes)
            self._file = path.open("ab", buffering=0)
            self._file.write(frame(pb.Record(time_ns=time_ns, started=started)))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", field="record") from None
        self._waiting: queue.Queue[tuple[Event, Outcome] | None] = queue.Queue(_MAX_WAITING)
        self._is_on = True
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def note(self, event: Event, effects: Sequence[Effect]) -> None:
        """Queue an event and its effects; return immediately."""
        if self._is_on:
            try:
                self._waiting.put_nowait((event, Outcome.of(effects)))
            except queue.Full:
                self._stop("the disk is too slow")

    def close(self) -> None:
        """Write all queued records, then return."""
        if self._thread.is_alive():
            self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _stop(self, reason: str) -> None:
        self._is_on = False
        logger.error("recording stopped", extra={"reason": reason})

    def _write(self) -> None:
        is_open = True
        while is_open:
            items = [self._waiting.get()]
            while len(items) < _MAX_EVENTS_PER_WRITE and not self._waiting.empty():
                items.append(self._waiting.get())
            frames = b"".join(frame(encode_record(*item)) for item in items if item is not None)
            is_open = None not in items
            try:
                while frames and self._is_on:
                    frames = frames[self._file.write(frames) :]
            except OSError as error:
                self._stop(error.strerror or str(error))


def read_recording(path: Path) -> Iterator[pb.Record]:
    """Yield the records of a file, up to the last complete one."""
    try:
        with path.open("rb") as file:
            is_empty = True
            for record in _read_records(file):
                if is_empty and not record.HasField("started"):
                    break
                is_empty = False
                yield record
            if is_empty:
                raise ConfigError(f"{path} is not a recording", field="file")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="file") from None


def frame(record: pb.Record) -> bytes:
    """Return a record in the file format."""
    data = record.SerializeToString()
    return len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def _read_records(file: BinaryIO) -> Iterator[pb.Record]:
    while len(head := file.read(_FRAME_BYTES)) == _FRAME_BYTES:
        length, checksum = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
        data = file.read(length) if length <= _MAX_RECORD_BYTES else b""
        if len(data) != length or zlib.crc32(data) != checksum:
            return
        try:
            yield pb.Record.FromString(data)
        except DecodeError:
            return


def _whole_bytes(file: BinaryIO) -> int:
    """Return the number of bytes up to the end of the last complete record."""
    end = 0
    for record in _read_records(file):
        if end == 0 and not record.HasField("started"):
            break
        end = file.tell()
    if end == 0 and file.seek(0, os.SEEK_END):
        raise ConfigError(f"{file.name} is not a recording", field="record")
    return end
