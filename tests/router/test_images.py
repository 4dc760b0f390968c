"""Images in prompts: the checks of their fields, and the request that the scheduler receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import scheduler_pb2
from router.pipeline.images import MAX_IMAGE_BYTES
from router.pipeline.prompt import PromptBuilder
from router.pipeline.request_checks import check_request
from router.protocols.openai.errors import param_of

TOKEN = "<file_sep>"
IMAGE = pb.Image(data=b"image")


@pytest.fixture(scope="module")
def model(folder: ModelFolder, tokenizer: Tokenizer) -> ModelFolder:
    """Return the embedded model, as if it read images."""
    config = folder.config | {"image_token_id": tokenizer.added_tokens[TOKEN]}
    template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
        f"{{{{ p.text if p.type == 'text' else '{TOKEN}' }}}}"
        "{% endfor %}{% endfor %}"
    )
    return dataclasses.replace(folder, architecture="smolvlm", config=config, chat_template=template)


class Encoder:
    """Encodes an image as two rows of its first byte; refuses images that begin with x."""

    def __init__(self, hidden_size: int) -> None:
        self._row_bytes = 2 * hidden_size

    async def __call__(self, data: bytes) -> scheduler_pb2.EncodeImageResponse:
        if data.startswith(b"x"):
            raise InvalidArgumentError("is not an image", field="data")
        size = self._row_bytes
        table = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT16, shape=[2, size // 2], data=data[:1] * 2 * size)
        return scheduler_pb2.EncodeImageResponse(embeddings=table, text=f"[{TOKEN}{TOKEN}]")


@pytest.fixture(scope="module")
def builder(model: ModelFolder) -> Iterator[PromptBuilder]:
    builder = PromptBuilder(model, 1, Encoder(model.hidden_size))
    yield builder
    builder.close()


async def test_images_of_a_prompt_become_rows_of_the_table(
    builder: PromptBuilder, tokenizer: Tokenizer, model: ModelFolder
) -> None:
    request = pb.GenerateRequest(prompt=f"a{TOKEN}b{TOKEN}", images=[pb.Image(data=b"1"), pb.Image(data=b"2")])
    ids = await builder.token_ids(request)
    plain = tokenizer.encode(f"a[{TOKEN}{TOKEN}]b[{TOKEN}{TOKEN}]")
    assert len(ids) == len(plain)
    assert [first for first, second in zip(ids, plain, strict=True) if first != second] == [
        model.vocab_size + row for row in range(4)
    ]
    assert request.prompt_tuning.table.shape == [4, model.hidden_size]
    assert request.prompt_tuning.table.data == b"".join(image * 4 * model.hidden_size for image in (b"1", b"2"))
    assert not request.images


async def test_the_chat_template_places_images_between_texts(builder: PromptBuilder, tokenizer: Tokenizer) -> None:
    parts = [pb.ContentPart(text="See "), pb.ContentPart(image=IMAGE), pb.ContentPart(text="?")]
    turns = [pb.ChatMessage(role="system", content="Hi"), pb.ChatMessage(role="user", parts=parts)]
    ids = await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=turns)))
    plain = tokenizer.encode(f"system:Hiuser:See [{TOKEN}{TOKEN}]?", add_special_tokens=False)
    assert [min(token, tokenizer.vocab_size) for token in ids] == [
        tokenizer.vocab_size if token == tokenizer.added_tokens[TOKEN] else token for token in plain
    ]


async def test_texts_beside_an_image_are_rendered_as_by_transformers(
    builder: PromptBuilder, tokenizer: Tokenizer, model: ModelFolder
) -> None:
    """No text is added between them."""
    texts = ["a", "b", "", " c"]
    parts = [pb.ContentPart(text=text) for text in texts[:2]] + [pb.ContentPart(image=IMAGE)]
    parts += [pb.ContentPart(text=text) for text in texts[2:]]
    said = pb.ChatMessage(role="assistant", parts=[pb.ContentPart(text="d"), pb.ContentPart(text="e")])
    turns = [pb.ChatMessage(role="user", parts=parts), said]
    ids = await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=turns)))

    def shown(part: pb.ContentPart) -> dict[str, str]:
        return {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}

    conversation = [{"role": turn.role, "content": [shown(part) for part in turn.parts]} for turn in turns]
    (wanted,), _ = render_jinja_template([conversation], chat_template=model.chat_template)
    plain = tokenizer.encode(wanted.replace(TOKEN, f"[{TOKEN}{TOKEN}]"), add_special_tokens=False)
    assert [min(token, tokenizer.vocab_size) for token in ids] == [
        tokenizer.vocab_size if token == tokenizer.added_tokens[TOKEN] else token for token in plain
    ]


async def test_texts_as_parts_are_joined_for_a_model_without_images(folder: ModelFolder) -> None:
    builder = PromptBuilder(folder, 1)
    parts = [pb.ContentPart(text="a"), pb.ContentPart(text="b")]
    found = [
        await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=[message])))
        for message in (pb.ChatMessage(role="user", parts=parts), pb.ChatMessage(role="user", content="a\nb"))
    ]
    builder.close()
    assert found[0] == found[1]


def chat(*parts: pb.ContentPart, content: str = "") -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", parts=parts, content=content)
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[message]))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(token_ids=pb.TokenIds(values=[5]), images=[IMAGE]), "images"),
        (pb.GenerateRequest(prompt=TOKEN * 17, images=[IMAGE] * 17), "images[16].data"),
        (pb.GenerateRequest(prompt=TOKEN, images=[pb.Image()]), "images[0].data"),
        (pb.GenerateRequest(prompt=TOKEN, images=[pb.Image(data=bytes(MAX_IMAGE_BYTES + 1))]), "images[0].data"),
        (
            pb.GenerateRequest(prompt=TOKEN, images=[IMAGE], prompt_tuning=pb.PromptTuningConfig(name="x")),
            "prompt_tuning",
        ),
        (pb.GenerateRequest(prompt=TOKEN * 2, images=[IMAGE]), "prompt"),
        (chat(pb.ContentPart(image=IMAGE), pb.ContentPart(text=TOKEN)), "chat"),
        (chat(pb.ContentPart(image=pb.Image(data=b"x"))), "chat.messages[0].parts[0].image.data"),
        (chat(pb.ContentPart(image=IMAGE), content="x"), "chat.messages[0].content"),
        (chat(pb.ContentPart()), "chat.messages[0].parts[0]"),
    ],
)
async def test_wrong_fields_are_named(builder: PromptBuilder, request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        await builder.token_ids(request_)
    assert raised.value.field == field


@pytest.mark.parametrize("output", ["prompt_log_probs", "exclude_input_from_output"])
def test_outputs_for_the_prompt_are_refused(model: ModelFolder, output: str) -> None:
    request = pb.GenerateRequest(prompt=TOKEN, images=[IMAGE], output=pb.OutputConfig(**{output: 0}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as raised:
        check_request(request, model)
    assert raised.value.field == f"output.{output}"


@pytest.mark.parametrize(
    "request_", [pb.GenerateRequest(prompt="x", images=[IMAGE]), chat(pb.ContentPart(image=IMAGE))]
)
def test_a_model_without_images_refuses_them(folder: ModelFolder, request_: pb.GenerateRequest) -> None:
    with pytest.raises(UnsupportedError, match="reads no images") as raised:
        check_request(request_, folder)
    assert raised.value.field.endswith("data")


def test_the_field_of_an_image_has_openais_name() -> None:
    assert param_of("chat.messages[2].parts[1].image.data") == "messages[2].content[1].image_url.url"
