"""Answers of every kind of request are proved by computing them again, and changed ones are found.

AUDIT_CHANGES=20 changes that many tokens of each answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import urllib.request
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.client import AsyncClient
from midstream.client.result import Result
from midstream.extras import LogProbs
from midstream.receipts.audit import Auditor, Finding, Verdict, check_offline, compute
from midstream.receipts.digests import body_leaf, links_of, log_probs_digest, model_identity
from midstream.receipts.evidence import Evidence, read_evidence
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.keys import SigningKey
from midstream.security.payload_keys import make_payload_key
from protos import generation_pb2 as pb
from protos import receipts_pb2
from tests.adapter_folders import write_lora, write_prompt
from tests.integration.service import Service, chat, eventually, midstream

LIAR = SigningKey.new()
# Of the shared service: an operator who signs something else than was computed.
LIES = {LIAR.key_id: LIAR.public}
NUM_TOKENS = 70
NUM_CHANGES = int(os.environ.get("AUDIT_CHANGES", "4"))


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingConfig(**{"temperature": 0.9, "seed": 11, **fields})}


KINDS: dict[str, dict[str, Any]] = {
    "greedy": sampling(temperature=0.0),
    "sampled": sampling(top_p=0.95, top_k=200),
    "two sequences": sampling(num_return_sequences=2),
    "penalties": sampling(repetition_penalty=1.2, presence_penalty=0.5, no_repeat_ngram_size=3),
    "beams": sampling(beam_width=3, num_return_sequences=2),
    "log probs": sampling() | {"output": pb.OutputConfig(log_probs=2, prompt_log_probs=1)},
    "grammar": sampling()
    | {"guided_decoding": pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="[a-z ]{40,60}")},
    "stop word": sampling(temperature=0.0) | {"stopping": pb.StoppingConfig(stop_words=[" of", ","])},
    "speculation": sampling()
    | {
        "speculative": pb.SpeculativeConfig(
            method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=4, max_ngram_size=2
        )
    },
    "post-processor": sampling() | {"logits_post_processor_name": "count_up"},
    "returned prompt": sampling() | {"output": pb.OutputConfig(exclude_input_from_output=False)},
}


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.routers()) as client:
        yield client


async def answered(
    client: AsyncClient, name: str, num_tokens: int = NUM_TOKENS, **fields: Any
) -> tuple[Evidence, Result]:
    request = chat(f"Write about rivers ({name}).", max_tokens=num_tokens, **KINDS[name], **fields)
    request.output.return_receipt = True
    result = await client.stream(request).result()
    assert result.receipt is not None
    known = await client.receipt(result.request_id, include_request=True, include_outputs=True)
    outputs = [sequence.token_ids for sequence in result.sequences]
    if request.output.HasField("exclude_input_from_output"):
        assert result.usage is not None
        outputs = [tokens[result.usage.prompt_tokens :] for tokens in outputs]
    assert known.outputs == outputs
    return Evidence(result.receipt, known.request, outputs), result


async def auditor_of(client: AsyncClient, keys: dict[str, ReceiptKey] | None = None) -> Auditor:
    auditor = Auditor(client, keys or {key.key_id: key for key in await client.receipt_keys()})
    await auditor.open()
    return auditor


@pytest.mark.parametrize("name", KINDS)
async def test_an_answer_is_proved(client: AsyncClient, name: str) -> None:
    evidence, _ = await answered(client, name)
    finding = await (await auditor_of(client)).audit(evidence)
    assert finding.verdict is Verdict.PROVED, finding
    assert finding.checked == ("signature", "request", "tokens", "recomputation")


def lie(evidence: Evidence, outputs: list[list[int]], **fields: Any) -> Evidence:
    """Return evidence that is consistent, but of another answer or model, and signed."""
    receipt = receipts_pb2.Receipt(nonce=evidence.receipt.nonce, key_id=LIAR.key_id)
    body = receipts_pb2.ReceiptBody.FromString(evidence.receipt.body)
    for index, (tokens, sequence) in enumerate(zip(outputs, body.sequences, strict=True)):
        sequence.links[:] = links_of(receipt.nonce, index, array("I", tokens))
        sequence.num_tokens = len(tokens)
    for name, value in fields.items():
        setattr(body, name, value)
    receipt.body = body.SerializeToString()
    receipt.signature = LIAR.sign(body_leaf(receipt.body))
    return Evidence(receipt, evidence.request, outputs)


async def test_every_changed_token_is_found(client: AsyncClient) -> None:
    auditor, source = await auditor_of(client, LIES), random.Random(1)
    changed: list[tuple[int, int, Evidence]] = []
    for name in ("greedy", "sampled", "two sequences", "penalties", "beams"):
        evidence, _ = await answered(client, name)
        assert evidence.outputs is not None
        for _ in range(NUM_CHANGES):
            outputs = [list(tokens) for tokens in evidence.outputs]
            index = source.randrange(len(outputs))
            place = source.randrange(len(outputs[index]))
            outputs[index][place] = (outputs[index][place] + source.randrange(1, 40_000)) % 49_000
            changed.append((index, place, lie(evidence, outputs)))
    slots = asyncio.Semaphore(32)

    async def audit(evidence: Evidence) -> Finding:
        async with slots:
            return await auditor.audit(evidence)

    findings = await asyncio.gather(*(audit(evidence) for _, _, evidence in changed))
    for (index, place, evidence), finding in zip(changed, findings, strict=True):
        assert evidence.outputs is not None
        assert (finding.verdict, finding.sequence, finding.token) == (Verdict.DIFFERS, index, place), finding
        assert finding.expected == evidence.outputs[index][place] != finding.found
    # Random tokens are rarely among the most likely ones; the margin is given where they are.
    assert all(finding.margin is None or finding.margin > 0 for finding in findings if finding.sequence == 0)


async def test_a_changed_log_probability_is_found(client: AsyncClient) -> None:
    evidence, result = await answered(client, "log probs", num_tokens=5)
    assert evidence.outputs is not None
    extras = result.sequences[0].extras
    assert extras is not None
    assert extras.log_probs is not None
    keys = {key.key_id: key for key in await client.receipt_keys()}
    found, _ = check_offline(replace(evidence, log_probs=[extras.log_probs]), keys)
    assert (found.verdict, found.checked[-1]) == (Verdict.VERIFIED, "log probs")
    values = list(extras.log_probs.token_log_probs)
    values[3] += 0.25
    rows = LogProbs(tuple(values), *list(_columns(extras.log_probs)))
    found, _ = check_offline(replace(evidence, log_probs=[rows]), keys)
    assert (found.verdict, found.reason) == (Verdict.INVALID, "log_probs[0]: are not those of the receipt")

    body = receipts_pb2.ReceiptBody.FromString(evidence.receipt.body)
    body.sequences[0].log_probs_digest = log_probs_digest(evidence.receipt.nonce, 0, rows)
    receipt = receipts_pb2.Receipt(nonce=evidence.receipt.nonce, key_id=LIAR.key_id, body=body.SerializeToString())
    receipt.signature = LIAR.sign(body_leaf(receipt.body))
    finding = await (await auditor_of(client, LIES)).audit(Evidence(receipt, evidence.request, evidence.outputs))
    assert (finding.verdict, finding.reason) == (
        Verdict.DIFFERS,
        "the log probabilities of sequence 0 differ",
    )


def _columns(rows: LogProbs) -> tuple[Any, ...]:
    return rows.top_k, rows.top_token_ids, rows.top_log_probs, rows.token_ranks


async def test_a_changed_end_is_found(client: AsyncClient) -> None:
    evidence, _ = await answered(client, "greedy", num_tokens=5)
    assert evidence.outputs is not None
    auditor = await auditor_of(client, LIES)
    shorter = await auditor.audit(lie(evidence, [evidence.outputs[0][:3]]))
    assert (shorter.verdict, shorter.token, shorter.expected) == (Verdict.DIFFERS, 3, None)
    assert shorter.found == evidence.outputs[0][3]
    receipt, body = receipts_pb2.Receipt(), receipts_pb2.ReceiptBody.FromString(evidence.receipt.body)
    body.sequences[0].finish_reason = pb.FINISH_REASON_STOP
    receipt.nonce, receipt.key_id, receipt.body = evidence.receipt.nonce, LIAR.key_id, body.SerializeToString()
    receipt.signature = LIAR.sign(body_leaf(receipt.body))
    finding = await auditor.audit(replace(evidence, receipt=receipt))
    assert (finding.verdict, finding.reason) == (Verdict.DIFFERS, "sequence 0 ends with length instead of stop")


@pytest.mark.parametrize("leaf", ["model", "weights", "arithmetic", "tokenizer", "template", "adapter"])
async def test_an_answer_of_another_model_cannot_be_checked(client: AsyncClient, leaf: str) -> None:
    evidence, _ = await answered(client, "greedy", num_tokens=3)
    assert evidence.outputs is not None
    body = receipts_pb2.ReceiptBody.FromString(evidence.receipt.body)
    model = receipts_pb2.ModelIdentity.FromString(body.model)
    leaves = {item.name: item.digest for item in model.leaves}
    assert {"model", "arithmetic", "tokenizer", "template"} <= leaves.keys()
    if leaf == "weights" and leaf not in leaves:
        leaves = {"weights": "unknown"} | leaves
    other = model_identity([*(leaves | {leaf: "swapped"}).items()], model.arithmetic).SerializeToString()
    finding = await (await auditor_of(client, LIES)).audit(lie(evidence, evidence.outputs, model=other))
    assert finding.verdict is Verdict.UNCHECKED, finding
    assert finding.reason


async def test_an_audit_waits_until_the_weights_are_hashed(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker hashes its weights after its start; its first answers do not state their complete identity."""
    evidence, _ = await answered(client, "greedy", num_tokens=3)
    assert evidence.outputs is not None
    body = receipts_pb2.ReceiptBody.FromString(evidence.receipt.body)
    model = receipts_pb2.ModelIdentity.FromString(body.model)
    leaves = {item.name: item.digest for item in model.leaves if item.name != "weights"}
    hashed, not_yet = (
        model_identity([*known.items()], model.arithmetic).SerializeToString()
        for known in (leaves | {"weights": "root"}, leaves)
    )
    auditor = await auditor_of(client, LIES)
    auditor._own_keys = LIES
    models, num_runs = [not_yet, not_yet, hashed], 0

    async def run_as_worker_that_hashes(*arguments: Any) -> Result:
        nonlocal num_runs
        result = await compute(*arguments)
        assert result.receipt is not None
        outputs = [sequence.token_ids for sequence in result.sequences]
        result.receipt = lie(Evidence(result.receipt, b"", None), outputs, model=models[min(num_runs, 2)]).receipt
        num_runs += 1
        return result

    monkeypatch.setattr("midstream.receipts.audit.compute", run_as_worker_that_hashes)
    monkeypatch.setattr("midstream.receipts.audit._WAIT_S", 0.0)
    finding = await auditor.audit(lie(evidence, evidence.outputs, model=hashed))
    assert (finding.verdict, num_runs) == (Verdict.PROVED, 3)
    models[2], num_runs = not_yet, 0
    monkeypatch.setattr("midstream.receipts.audit._MAX_WAITS", 3)
    finding = await auditor.audit(lie(evidence, evidence.outputs, model=hashed))
    assert (finding.verdict, num_runs) == (Verdict.UNCHECKED, 2)
    assert finding.reason == "the service cannot run the request: its weights are not hashed yet; try again later"


@pytest.mark.parametrize("kind", ["lora", "prompt_tuning"])
async def test_an_answer_with_an_adapter_is_proved_until_the_adapter_is_swapped(
    client: AsyncClient, tmp_path: Path, kind: str
) -> None:
    write = write_lora if kind == "lora" else write_prompt
    name, folders = f"audited_{kind}", [write(tmp_path / str(seed), 4, seed) for seed in range(2)]
    config: Any = pb.LoraConfig(name=name) if kind == "lora" else pb.PromptTuningConfig(name=name)
    await client.load_lora(name, str(folders[0]))
    evidence, _ = await answered(client, "sampled", **{kind: config})
    auditor = await auditor_of(client)
    finding = await auditor.audit(evidence)
    assert finding.verdict is Verdict.PROVED, finding
    await client.unload_lora(name)
    finding = await auditor.audit(evidence)
    assert finding.verdict is Verdict.UNCHECKED, finding
    await client.load_lora(name, str(folders[1]))
    finding = await auditor.audit(evidence)
    leaf = "adapter" if kind == "lora" else "prompt"
    assert (finding.verdict, finding.reason) == (
        Verdict.UNCHECKED,
        f"the service computes it differently: its {leaf} differs",
    )
    await client.unload_lora(name)


async def test_the_command(service: Service, client: AsyncClient, tmp_path: Path) -> None:
    http = service.processes("router")[0]["addresses"]["http"]

    def fetch_keys() -> str:
        with urllib.request.urlopen(f"http://{http}/v1/receipts/keys", timeout=240) as answer:
            text: str = answer.read().decode()
        return text

    keys, file = tmp_path / "keys.json", tmp_path / "evidence.jsonl"
    keys.write_text(await asyncio.to_thread(fetch_keys))
    run_dir = str(service.run_dir)

    def audit(*flags: str) -> tuple[int, list[Any]]:
        done = midstream("audit", str(file), "--json", "--run-dir", run_dir, *flags)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    generated = ("generate", "Count to ten.", "--max-tokens", "20", "--receipt", str(file), "--run-dir", run_dir)
    await asyncio.to_thread(midstream, *generated)
    status, findings = await asyncio.to_thread(audit)
    assert (status, [item["verdict"] for item in findings]) == (0, ["proved"])
    assert (await asyncio.to_thread(audit, "--offline", "--keys", str(keys)))[0] == 0
    assert (await asyncio.to_thread(audit, "--until", "2020-01-01"))[0] == 1
    item = json.loads(file.read_text())
    (evidence,) = read_evidence(file.read_text(), "it")
    assert evidence.outputs is not None
    # The service still has request and output.
    file.write_text(json.dumps({"receipt": item["receipt"]}))
    status, findings = await asyncio.to_thread(audit)
    assert (status, findings[0]["verdict"]) == (0, "proved")
    unknown = lie(evidence, evidence.outputs, request_id="unknown")
    file.write_text(json.dumps({"receipt": unknown.to_json()["receipt"]}))
    (tmp_path / "liar.jwk").write_text(json.dumps(LIAR.public.to_jwk()))
    status, findings = await asyncio.to_thread(audit, "--keys", str(tmp_path / "liar.jwk"))
    assert (status, findings[0]["verdict"]) == (3, "cannot be checked")
    item["outputs"][0][2] += 1
    file.write_text(json.dumps(item))
    status, findings = await asyncio.to_thread(audit, "--offline", "--keys", str(keys))
    assert (status, findings[0]["verdict"], findings[0]["checked"]) == (1, "invalid", ["signature", "request"])


async def kill(service: Service, kind: str) -> None:
    """Kill a process, and wait for its successor."""
    before = await service.all_serving(kind)
    os.kill(before[0]["pid"], signal.SIGKILL)

    def is_replaced(parts: list[dict[str, Any]]) -> bool:
        return len(parts) == len(before) and before[0]["pid"] not in {part["pid"] for part in parts}

    await eventually(lambda: service.serving(kind), is_replaced, 60)


async def test_answers_that_survived_kills_are_proved_from_the_ledger(tmp_path: Path) -> None:
    """The service has stored requests and answers, and the ledger has the receipts; nothing comes from the client."""
    make_payload_key(tmp_path / "payload", "key")
    settings = {
        "MIDSTREAM_RECEIPTS": "payload",
        "MIDSTREAM_PAYLOAD_KEYS": str(tmp_path / "payload"),
        "MIDSTREAM_FINISHED_TTL_S": "1",
        "MIDSTREAM_WORKER_TIMEOUT_MS": "30000",
    }
    service = Service.start(tmp_path / "run", "--workers", "2", **settings)
    try:
        async with AsyncClient(service.routers()) as client:

            async def run(name: str) -> Result:
                request = chat(f"Describe a city ({name}).", max_tokens=150, **KINDS[name])
                request.stopping.ignore_eos = True
                return await client.stream(request).result()

            running = [asyncio.create_task(run(name)) for name in ("greedy", "sampled", "two sequences", "penalties")]
            for kind in ("gpu_worker", "scheduler", "gpu_worker"):
                await asyncio.sleep(1.0)  # kills at any time are survived
                await kill(service, kind)
            results = await asyncio.gather(*running)
            http = service.processes("router")[0]["addresses"]["http"]
            ledger = tmp_path / "ledger.json"

            def fetch() -> bytes:
                with urllib.request.urlopen(f"http://{http}/ledger", timeout=240) as answer:
                    page: bytes = answer.read()
                return page

            page = await eventually(
                lambda: asyncio.to_thread(fetch), lambda text: len(json.loads(text)["data"]) == len(results), 60
            )
            ledger.write_bytes(page)
            audit = await asyncio.to_thread(
                midstream, "audit", str(ledger), "--json", "--run-dir", str(service.run_dir), timeout=200
            )
            findings = [json.loads(line) for line in audit.stdout.splitlines()]
            assert audit.returncode == 0, audit.stdout + audit.stderr
            assert {item["request_id"] for item in findings} == {result.request_id for result in results}
            assert {item["verdict"] for item in findings} == {"proved"}
    finally:
        service.stop()
