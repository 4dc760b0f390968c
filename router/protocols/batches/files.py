"""Files of clients: each is stored as one document that describes it, and chunks with its contents.

A file exists once its description is written, which happens last. Chunks without a description expire when the file
would have expired.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

from midstream.errors import InvalidArgumentError, NotFoundError
from router.pipeline.cells import Cell
from router.pipeline.client_documents import ClientDocument, ClientDocuments

FILE_PREFIX = "file-"
_FILE, _CHUNK = "file", "file_chunk"
_CHUNK_BYTES = 1 << 20
_CHUNKS_AT_ONCE = 4
NS_PER_S = 1_000_000_000
_ID = re.compile(r"[0-9a-f]{32}[oe]?")  # as from `new_id`; output and error files have an additional letter


def new_id(prefix: str) -> str:
    """Return a new id; ids sort in the order in which they were created."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def check_after(after: str, prefix: str) -> str:
    """Return the id after which a list continues; empty for its beginning. The item with this id may have been deleted
    since. Raises InvalidArgumentError if `after` cannot be an id with this prefix.
    """
    if after and not (after.startswith(prefix) and _ID.fullmatch(after.removeprefix(prefix))):
        raise InvalidArgumentError(f"{after[:64]!r} is not the id of an item of this list", field="after")
    return after


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Description of a file.

    Attributes:
        digest: Digest of the contents, to recognize a repeated upload.
    """

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    digest: str = ""

    def view(self) -> dict[str, object]:
        """Return the description in the format that clients see."""
        fields = asdict(self)
        del fields["digest"]
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class Files:
    """The files of all clients. `owner` is the client's name; empty if authentication is off."""

    def __init__(self, documents: ClientDocuments) -> None:
        self._documents = documents

    async def get(self, owner: str, file_id: str) -> tuple[Cell, FileInfo]:
        """Return a file's description, and the cell that stores it. Raises NotFoundError if the file does not exist."""
        missing = NotFoundError(f"no file {file_id[:64]!r} was found")
        if not file_id.startswith(FILE_PREFIX):
            raise missing
        try:
            found = await self._documents.get(_FILE, owner, file_id)
        except NotFoundError:
            raise missing from None
        return found.cell, _info(found)

    async def list(self, owner: str, *, after: str, limit: int, ascending: bool, purpose: str) -> list[FileInfo]:
        """List the files after the id `after`, filtered by `purpose` if it is not empty."""
        infos: list[FileInfo] = []
        while len(infos) < limit:
            found = await self._documents.newest(_FILE, owner, after=after, limit=limit, ascending=ascending)
            infos += [info for info in map(_info, found) if purpose in ("", info.purpose)]
            if not found:
                break
            after = found[-1].id
        return infos[:limit]

    async def write(
        self, cell: Cell, owner: str, file_id: str, contents: AsyncIterator[bytes], *, expires_at: int, limit: int
    ) -> tuple[int, str]:
        """Store the contents of a file that does not exist yet; return their size and digest. Raises
        InvalidArgumentError if the contents have more than `limit` bytes.
        """
        digest, num_bytes, number, chunk = hashlib.blake2b(digest_size=16), 0, 0, bytearray()
        async for part in contents:
            digest.update(part)
            num_bytes += len(part)
            if num_bytes > limit:
                raise InvalidArgumentError(f"has more than {limit} bytes", field="file")
            chunk += part
            while len(chunk) >= _CHUNK_BYTES:
                await self.put_chunk(cell, owner, file_id, f"{number:08d}", bytes(chunk[:_CHUNK_BYTES]), expires_at)
                del chunk[:_CHUNK_BYTES]
                number += 1
        if chunk:
            await self.put_chunk(cell, owner, file_id, f"{number:08d}", bytes(chunk), expires_at)
        return num_bytes, digest.hexdigest()

    async def put_chunk(self, cell: Cell, owner: str, file_id: str, place: str, data: bytes, expires_at: int) -> None:
        """Store a chunk; the contents of a file are its chunks in the order of `place`."""
        await self._documents.put(cell, _CHUNK, owner, f"{file_id}/{place}", data, expires_ns=expires_at * NS_PER_S)

    async def create(self, cell: Cell, owner: str, info: FileInfo) -> None:
        """Create a file whose contents are already stored."""
        data = json.dumps(asdict(info)).encode()
        await self._documents.put(cell, _FILE, owner, info.id, data, expires_ns=info.expires_at * NS_PER_S)

    async def contents(self, cell: Cell, owner: str, file_id: str) -> AsyncIterator[bytes]:
        async for chunk in self._documents.parts(cell, _CHUNK, owner, f"{file_id}/", _CHUNKS_AT_ONCE):
            yield chunk.data

    async def lines(self, cell: Cell, owner: str, info: FileInfo, limit: int) -> AsyncIterator[bytes]:
        """Yield the lines of a file without line endings; blank lines are skipped. A line longer than `limit` bytes may
        be truncated, but keeps at least `limit` + 1 bytes, so that callers can detect it.

        Raises:
            NotFoundError: The file was deleted before its end was read.
        """
        rest, num_bytes = b"", 0
        async for data in self.contents(cell, owner, info.id):
            num_bytes += len(data)
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[: limit + 1]
            for line in lines:
                if line.strip():
                    yield line
        if num_bytes < info.bytes:
            raise NotFoundError(f"the file {info.id!r} was deleted")
        if rest.strip():
            yield rest

    async def delete(self, cell: Cell, owner: str, file_id: str) -> None:
        await self._documents.delete(cell, _FILE, owner, file_id)
        async for chunk in self._documents.parts(cell, _CHUNK, owner, f"{file_id}/", _CHUNKS_AT_ONCE):
            await self._documents.delete(cell, _CHUNK, owner, chunk.id)


def _info(document: ClientDocument) -> FileInfo:
    return FileInfo(**json.loads(document.data))
