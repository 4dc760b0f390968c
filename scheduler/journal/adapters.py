"""Encodes and decodes the journal's adapter records."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from protos import journal_pb2 as pb
from scheduler.journal import LoadedAdapter
from scheduler.journal.store import StoredJournal, unseal

logger = logging.getLogger(__name__)


def encode_adapter(adapter: LoadedAdapter, model_fingerprint: str) -> bytes:
    return pb.JournalAdapter(
        name=adapter.name,
        path=adapter.path,
        fingerprint=adapter.fingerprint,
        num_bytes=adapter.num_bytes,
        rank=adapter.rank,
        num_virtual_tokens=adapter.num_virtual_tokens,
        model_fingerprint=model_fingerprint,
    ).SerializeToString()


def read_adapters(stored: StoredJournal, model_fingerprint: str) -> tuple[LoadedAdapter, ...]:
    """Return the adapters of this model; damaged records are skipped."""
    adapters = []
    for name, sealed in stored.adapters:
        data = unseal(sealed)
        try:
            record = None if data is None else pb.JournalAdapter.FromString(data)
        except DecodeError:
            record = None
        if record is None:
            logger.error("the journal's record of the adapter %s is damaged", name)
        elif record.model_fingerprint == model_fingerprint:
            adapters.append(
                LoadedAdapter(
                    name=record.name,
                    path=record.path,
                    fingerprint=record.fingerprint,
                    num_bytes=record.num_bytes,
                    rank=record.rank,
                    num_virtual_tokens=record.num_virtual_tokens,
                )
            )
    return tuple(adapters)
