"""Encodes and decodes the journal's adapter records."""

from __future__ import annotations

import logging
from dataclasses import asdict, fields

from google.protobuf.message import DecodeError

from protos import journal_pb2 as pb
from scheduler.journal import LoadedAdapter
from scheduler.journal.store import StoredJournal, unseal

logger = logging.getLogger(__name__)


def encode_adapter(adapter: LoadedAdapter, model_fingerprint: str) -> bytes:
    return pb.JournalAdapter(**asdict(adapter), model_fingerprint=model_fingerprint).SerializeToString()


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
            adapters.append(LoadedAdapter(**{item.name: getattr(record, item.name) for item in fields(LoadedAdapter)}))
    return tuple(adapters)
