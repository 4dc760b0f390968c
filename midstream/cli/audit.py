"""`midstream audit`: check receipts, and compute their answers again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from midstream.cli.connect import add_connection, open_client
from midstream.cli.progress import work_through
from midstream.cli.receipt_keys import read_keys
from midstream.errors import ConfigError, InvalidArgumentError
from midstream.receipts.evidence import Evidence, read_evidence
from protos import receipts_pb2

if TYPE_CHECKING:
    from midstream.receipts.audit import Finding

_EXIT_DIFFERS, _EXIT_UNCHECKED = 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="Receipts as JSON, with requests and outputs if they are to be computed again: from `midstream generate "
        "--receipt`, /v1/receipts/ID, or pages of the ledger.",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="The public keys to trust: what /v1/receipts/keys returned, or a NAME.jwk. [those of the service]",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="Check only signatures and digests, without a service; needs --keys.",
    )
    parser.add_argument("--since", metavar="TIME", help="Only requests that ended at or after this time, as ISO 8601.")
    parser.add_argument("--until", metavar="TIME", help="Only requests that ended before this time.")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="Requests in progress. [64]")
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON lines.")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0 if every answer is proved (or, with --offline, verified); 1 if any differs or is invalid; 3 if none does, but
        some cannot be checked.
    """
    try:
        from midstream.receipts.audit import Verdict
    except ImportError as error:
        raise ConfigError(f"needs `pip install midstream[audit]` ({error})", field="audit") from None
    evidence = list(_selected(arguments))
    if not evidence:
        raise InvalidArgumentError("contain no receipts in this range of time", field="files")
    findings = _offline(arguments, evidence) if arguments.offline else asyncio.run(_online(arguments, evidence))
    if arguments.json:
        for finding in findings:
            print(json.dumps({name: value for name, value in asdict(finding).items() if value is not None}))
    else:
        _show(findings)
    verdicts = {finding.verdict for finding in findings}
    if verdicts & {Verdict.DIFFERS, Verdict.INVALID}:
        return _EXIT_DIFFERS
    return _EXIT_UNCHECKED if Verdict.UNCHECKED in verdicts else 0


def _selected(arguments: argparse.Namespace) -> Iterator[Evidence]:
    """Yield the evidence of the range of time; unreadable receipts belong to every range."""
    since, until = _time_ns(arguments.since, "since"), _time_ns(arguments.until, "until")
    for path in arguments.files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidArgumentError("is not text", field=str(path)) from None
        for item in read_evidence(text, str(path)):
            try:
                finished = receipts_pb2.ReceiptBody.FromString(item.receipt.body).finished_unix_ns
            except ValueError:  # DecodeError
                finished = 0
            if not finished or (since or 0) <= finished < (until or 1 << 63):
                yield item


def _time_ns(text: str | None, field: str) -> int | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgumentError("must be a time such as 2026-01-31T12:00:00Z", field=field) from None
    return int((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1e9)


def _offline(arguments: argparse.Namespace, evidence: Sequence[Evidence]) -> list[Finding]:
    from midstream.receipts.audit import check_offline

    if arguments.keys is None:
        raise InvalidArgumentError("is needed with --offline: the keys to trust", field="keys")
    keys = read_keys(arguments.keys)
    return [check_offline(item, keys)[0] for item in evidence]


async def _online(arguments: argparse.Namespace, evidence: Sequence[Evidence]) -> list[Finding]:
    from midstream.receipts.audit import Auditor

    async with open_client(arguments) as client:
        keys = read_keys(arguments.keys) if arguments.keys is not None else {}
        if not keys:
            keys = {key.key_id: key for key in await client.receipt_keys()}
        auditor = Auditor(client, keys)
        await auditor.open()
        return await work_through(evidence, auditor.audit, concurrency=arguments.concurrency, title="auditing")


def _show(findings: Sequence[Finding]) -> None:
    table = Table("request", "ended", "verdict", "details")
    for finding in findings:
        ended = datetime.fromtimestamp(finding.finished_unix_ns / 1e9, UTC).isoformat(timespec="seconds")
        shown = ended if finding.finished_unix_ns else ""
        table.add_row(finding.request_id, shown, finding.verdict.value, _details(finding))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _details(finding: Finding) -> str:
    if finding.token is not None:
        margin = "" if finding.margin is None else f", {finding.margin:.3g} more likely"
        place = f"token {finding.token} of sequence {finding.sequence}"
        return f"{place}: {finding.expected} in the receipt, {finding.found} computed{margin}"
    parts = [finding.reason or f"checked: {', '.join(finding.checked)}"]
    if finding.error_code:
        parts.append(f"the request ended with the error {finding.error_code}")
    return "; ".join(parts)
