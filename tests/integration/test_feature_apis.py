"""Every cell of the feature table for an API: the API gives the answer of the native call or rejects the request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from midstream.client import Client
from midstream.executor import GenerationExecutor
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from tests.adapter_folders import write_lora
from tests.features.table import NOT_APPLICABLE, WORKS, read
from tests.integration.api_clients import ApiClients
from tests.integration.feature_requests import LORA, Answer, Asking, RefusedError
from tests.integration.service import Service

CELLS = [
    pytest.param(name, api, cell, id=f"{name}-{api}")
    for name, row in read().features.items()
    for api, cell in row.apis.items()
    if cell != NOT_APPLICABLE
]
# For features that return more than text: the name of the additional output in `Answer.beside`.
BESIDE = {
    "log_probs": "log_probs",
    "prompt_log_probs": "prompt_log_probs",
    "context_logits": "context_logits",
    "generation_logits": "generation_logits",
    "additional_outputs": "topk_logits.3",
    "tools": "tool_calls",
}
# These features do not change the text; all others do.
UNCHANGED = {*BESIDE, "drafts", "retention", "priority", "cache_salt", "streaming"}
# Number of sequences that a feature returns, if it is not one.
NUM_SEQUENCES = {"sequences": 2, "beams": 2}


@pytest.fixture(scope="module")
def executor(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationExecutor]:
    """Yield an executor that is connected to the service, with an adapter loaded."""
    folder = write_lora(tmp_path_factory.mktemp("clients") / "lora", 4, 9)
    with Client(service.routers()) as client, GenerationExecutor.create(address=service.routers()[0]) as executor:
        client.load_lora(LORA, str(folder))
        yield executor
        client.unload_lora(LORA)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_model_folder("smollm2").path)


@pytest.fixture(scope="module")
def addresses(service: Service) -> dict[str, str]:
    addresses: dict[str, str] = service.processes("router")[0]["addresses"]
    return addresses


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, bool], Answer]:
    """Return the cache for the answers of the native call."""
    return {}


@pytest.fixture
async def asking(
    addresses: dict[str, str],
    executor: GenerationExecutor,
    tokenizer: Tokenizer,
    expected: dict[tuple[str, bool], Answer],
) -> AsyncIterator[Asking]:
    clients = ApiClients(addresses["grpc"], addresses["http"])
    yield Asking(clients, executor, tokenizer, addresses["grpc"], expected)
    await clients.close()


@pytest.mark.parametrize(("feature", "api", "cell"), CELLS)
async def test_a_feature_through_each_api(asking: Asking, feature: str, api: str, cell: str) -> None:
    if cell != WORKS:
        with pytest.raises(RefusedError, match=cell.removeprefix("refused ")):
            await asking.ask(api, feature)
        return
    answer = await asking.ask(api, feature)
    assert len(answer.texts) == NUM_SEQUENCES.get(feature, 1)
    if feature in BESIDE:
        assert BESIDE[feature] in answer.beside
    if feature == "tools":
        return
    is_chat = api == "chat" or feature == "chat"
    is_own = api == "executor" and feature in ("penalties", "sequences")
    expected = await asking.native(f"{feature} of the executor" if is_own else feature, chat=is_chat)
    assert answer.texts == expected.texts
    if not is_chat:
        (plain,) = (await asking.native("plain")).texts
        assert all(text.startswith(plain) for text in answer.texts) == (feature in UNCHANGED)
