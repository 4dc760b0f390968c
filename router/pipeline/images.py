"""Replaces the images of a request by virtual tokens, so that no other part of the service needs to know about images.

1. A prompt contains the model's image token once for each image: written by the client, or by the chat template.
2. `encode` has workers encode the images, and puts their embeddings into the request's table of virtual tokens.
3. `expand` replaces each image token by the text of its image, in which the token occurs once for each embedding.
4. `number` replaces the image tokens among the prompt's token ids by the ids of the table's rows.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Iterator, Sequence

from midstream.errors import ExecutionError, InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import scheduler_pb2
from router.authentication import current_caller
from router.pipeline.client_semaphores import ClientSemaphores

MAX_IMAGES = 16
MAX_IMAGE_BYTES = 16 << 20
# Maximum number of images of one client that workers encode at the same time, so that others' images do not wait long.
_MAX_ENCODED_PER_CLIENT = 2
# The table must fit into a message to the scheduler, in addition to the rest of the request.
_MAX_TABLE_BYTES = 48 << 20

_PARTS = operator.attrgetter("parts")
EncodeImage = Callable[[bytes], Awaitable[scheduler_pb2.EncodeImageResponse]]


def images_of(request: pb.GenerateRequest) -> list[tuple[str, bytes]]:
    """Return the images of a request in order, with the paths of their fields."""
    if not request.images and not request.HasField("chat"):
        return []
    images = [(f"images[{i}].data", image.data) for i, image in enumerate(request.images)]
    messages = request.chat.messages
    if not any(map(_PARTS, messages)):  # quick even if there are thousands
        return images
    for i, message in enumerate(messages):
        for k, part in enumerate(message.parts):
            if part.HasField("image"):
                images.append((f"chat.messages[{i}].parts[{k}].image.data", part.image.data))
    return images


def check_images(request: pb.GenerateRequest, images: Sequence[tuple[str, bytes]], model: ModelFolder) -> None:
    """Check the images of a request, as returned by `images_of`, and the fields that exclude images.

    Raises:
        InvalidArgumentError: A field is invalid; the error names it.
        UnsupportedError: The model does not accept images.
    """
    if not images:
        return
    if model.image_token_id is None:
        reason = f": {model.image_refusal}" if model.image_refusal else ""
        raise UnsupportedError(f"the model {model.name!r} reads no images{reason}", field=images[0][0])
    if request.images and request.WhichOneof("input") != "prompt":
        raise InvalidArgumentError("requires prompt; in a chat, images are parts of messages", field="images")
    if len(images) > MAX_IMAGES:
        raise InvalidArgumentError(f"is image {MAX_IMAGES + 1}; at most {MAX_IMAGES} are allowed", field=images[-1][0])
    for field, data in images:
        if not 0 < len(data) <= MAX_IMAGE_BYTES:
            raise InvalidArgumentError(f"has {len(data)} bytes; must have 1 to {MAX_IMAGE_BYTES}", field=field)
    if request.HasField("prompt_tuning"):
        raise InvalidArgumentError("must not be set together with images", field="prompt_tuning")


class PromptImages:
    """The images of one model's prompts."""

    def __init__(self, model: ModelFolder, tokenizer: Tokenizer, encode: EncodeImage | None) -> None:
        """Prepare for a model.

        Args:
            model: The served model.
            tokenizer: Its tokenizer.
            encode: Has a worker encode an image; None if images are to be refused.
        """
        self._model, self._encode = model, encode
        self._token_id = model.image_token_id
        self._by_client = ClientSemaphores(_MAX_ENCODED_PER_CLIENT)
        self._token = (tokenizer.token(self._token_id) if self._token_id is not None else None) or ""

    async def encode(self, request: pb.GenerateRequest, images: Sequence[tuple[str, bytes]]) -> list[str]:
        """Have the images of a request, as returned by `images_of`, encoded; return their texts.

        Their embeddings are put into the request's table.

        Raises:
            MidstreamError: An image is refused, or no worker can encode it; the error names its field.
        """
        if not images:
            return []
        check_images(request, images, self._model)
        with self._by_client.use(current_caller.get().name) as slots:

            async def encoded(field: str, data: bytes) -> scheduler_pb2.EncodeImageResponse:
                async with slots:
                    return await self._encoded(field, data)

            found = await asyncio.gather(*(encoded(field, data) for field, data in images))
        table = request.prompt_tuning.table
        table.dtype = found[0].embeddings.dtype
        table.data = b"".join(item.embeddings.data for item in found)
        table.shape[:] = (sum(item.embeddings.shape[0] for item in found), self._model.hidden_size)
        if len(table.data) > _MAX_TABLE_BYTES:
            reason = f"make the embeddings {len(table.data)} bytes long; at most {_MAX_TABLE_BYTES} are allowed"
            raise InvalidArgumentError(reason, field=images[0][0].partition("[")[0])
        del request.images[:]
        return [item.text for item in found]

    def expand(self, prompt: str, texts: Sequence[str], field: str) -> str:
        """Return a prompt with the texts of its images instead of their image tokens.

        Raises:
            InvalidArgumentError: The number of image tokens is not the number of images.
        """
        if not texts:
            return prompt
        pieces = prompt.split(self._token)
        if len(pieces) - 1 != len(texts):
            raise InvalidArgumentError(
                f"contains the image token {self._token} {len(pieces) - 1} times; must contain it {len(texts)} times, "
                "once for each image",
                field=field,
            )
        return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)

    def number(self, token_ids: Sequence[int], num_rows: int) -> list[int]:
        """Return a prompt's token ids with the ids of virtual tokens instead of the image token.

        Raises:
            ExecutionError: The tokenizer does not encode each image token as one token id.
        """
        rows: Iterator[int] = iter(range(self._model.vocab_size, self._model.vocab_size + num_rows))
        count = sum(token_id == self._token_id for token_id in token_ids)
        if count != num_rows:
            raise ExecutionError(f"the prompt has {count} image tokens; must have {num_rows}")
        return [next(rows) if token_id == self._token_id else token_id for token_id in token_ids]

    async def _encoded(self, field: str, data: bytes) -> scheduler_pb2.EncodeImageResponse:
        if self._encode is None:
            raise UnsupportedError("images are not supported here", field=field)
        try:
            return await self._encode(data)
        except MidstreamError as error:
            raise type(error)(error.message, field=field) from None
