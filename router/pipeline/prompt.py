"""Converts a request's input to token ids in a thread pool, so that rendering and tokenizing block no event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from midstream.errors import ContextLengthError, InvalidArgumentError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer, open_tokenizer
from midstream.processors import num_compute_threads
from protos import generation_pb2 as pb
from router.pipeline.chat_template import ChatTemplate
from router.pipeline.fair_threads import FairThreads
from router.pipeline.images import EncodeImage, PromptImages, images_of
from router.pipeline.message_shape import PROBE_TOOLS, MessageShape, message_shape, text_part

_T = TypeVar("_T")
# Prompts shorter than this are tokenized faster than a thread pool could return the result.
_INLINE_CHARACTERS = 256
_INLINE_MESSAGES = 64


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How an input is converted to tokens.

    Attributes:
        adds_special_tokens: Whether a text gets the tokenizer's special tokens. None means that a prompt does, and a
            conversation does not, since its template contains them.
        max_tokens: Number of tokens to which the prompt is truncated, keeping its end; -1 means as many as leave room
            for the output, and None means no truncation.
        continues_last: Whether the output continues the last message of a conversation.
        keeps_start: Whether truncation keeps the start of the prompt instead.
    """

    adds_special_tokens: bool | None = None
    max_tokens: int | None = None
    continues_last: bool = False
    keeps_start: bool = False


_DEFAULT_OPTIONS = PromptOptions()
# Marks the end of a message's content in a rendered conversation; templates do not change characters of the private use
# area.
_END_MARK = "\ue0f1end\ue0f2"


class PromptBuilder:
    """Renders and tokenizes the prompts of one model."""

    def __init__(self, folder: ModelFolder, num_threads: int, encode_image: EncodeImage | None = None) -> None:
        """Load the tokenizer and the chat template.

        Args:
            num_threads: Maximum number of prompts that are processed concurrently for one client; at most one less than
                the number of processors.
            encode_image: Has a worker encode an image; None if images are to be refused.

        Raises:
            ConfigError: One of them is invalid.
        """
        self.tokenizer = open_tokenizer(folder.path, folder.tokenizer_fingerprint)
        self._images = PromptImages(folder, self.tokenizer, encode_image)
        self._max_tokens = folder.max_sequence_length
        self._num_types, self._word_vocab_size = folder.num_token_types, folder.word_vocab_size
        # A classifier's template may be left over from the base model from which it was fine-tuned.
        has_own_template = re.search("[\"']document[\"']", folder.templates) is not None
        self._joins_pairs = folder.num_labels is not None and not has_own_template
        tokens = template_tokens(folder, self.tokenizer)
        sources = folder.chat_template, folder.tool_template
        self._template, self._tool_template = (
            None if source is None else ChatTemplate(source, tokens, num_threads + 1) for source in sources
        )
        self._shapes = {
            has_tools: message_shape(partial(template.render, tools=PROBE_TOOLS if has_tools else None))
            for has_tools in (False, True)
            if (template := self._template_for(has_tools=has_tools)) is not None
        }
        # This leaves a thread for other clients, and also a processor: tokenizing does not hold the interpreter lock.
        num_per_client = max(min(num_threads, num_compute_threads() - 1), 1)
        self._threads = FairThreads(num_threads + 1, "tokenizer", num_per_client=num_per_client)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()
        for template in (self._template, self._tool_template):
            if template is not None:
                template.close()

    async def token_ids(self, request: pb.GenerateRequest, options: PromptOptions = _DEFAULT_OPTIONS) -> list[int]:
        """Return the input's token ids (never empty).

        The embeddings of images are put into the request's table of virtual tokens.

        Raises:
            InvalidArgumentError: The input is missing, empty or too long, or a conversation cannot be parsed.
            UnsupportedError: The model has no chat template for a conversation, or does not accept images.
            MidstreamError: An image cannot be encoded.
        """
        kind, limit = request.WhichOneof("input"), options.max_tokens
        if limit == -1:
            limit = max(self._max_tokens - max(request.max_tokens, 1), 1)
        texts = await self._images.encode(request, await self.look_through(request, lambda: images_of(request)))
        if texts and limit is not None:
            raise UnsupportedError("cannot be combined with images", field="truncate_prompt_tokens")
        if kind == "token_ids":
            ids = request.token_ids.values[:]
            if limit is not None:
                ids = ids[:limit] if options.keeps_start else ids[-limit:]
        elif kind == "prompt":
            prompt = self._images.expand(request.prompt, texts, "prompt")
            if not options.keeps_start or limit is None:
                self._check_length(prompt, "prompt")
            adds = options.adds_special_tokens is not False
            with _naming("prompt"):
                ids = await self._run(len(prompt), lambda: self._text_ids(prompt, limit, options, adds=adds))
        elif kind == "chat":
            with _naming("chat"):
                ids = await self._run(
                    _INLINE_CHARACTERS + 1, lambda: self._chat_ids(request.chat, texts, options, limit)
                )
        else:
            names = "prompt, token_ids, chat and prompt_embeddings"
            raise InvalidArgumentError(f"one of {names} must be set", field="input")
        if not ids:
            raise InvalidArgumentError("must not be empty", field=str(kind))
        return self._images.number(ids, request.prompt_tuning.table.shape[0]) if texts else ids

    async def look_through(self, request: pb.GenerateRequest, look: Callable[[], _T]) -> _T:
        """Return the result of `look`, which examines all messages of a request; use a thread if there are many."""
        return look() if len(request.chat.messages) <= _INLINE_MESSAGES else await self._threads.run(look)

    async def bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """Return the token sequences of banned words: for each word, one as it is and one with a preceding space."""

        def encode() -> list[list[int]]:
            spellings = [spelling for word in words for spelling in (word, " " + word)]
            with _naming("stopping.bad_words"):
                return [self.tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]

        return [ids for ids in await self._run(sum(map(len, words)), encode) if ids] if words else []

    async def _run(self, num_characters: int, function: Callable[[], _T]) -> _T:
        if num_characters <= _INLINE_CHARACTERS:
            return function()
        return await self._threads.run(function)

    def _text_ids(self, text: str, limit: int | None, options: PromptOptions, *, adds: bool) -> list[int]:
        """Return the tokens of a text, truncated to `limit`; special tokens around the text, which `adds` asks for, are
        kept.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=adds)
        if limit is None or len(ids) <= limit:
            return ids
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        num_special = len(ids) - len(plain)
        start = next((i for i in range(num_special) if ids[i : i + len(plain)] == plain), num_special)
        num_cut = min(len(ids) - limit, len(plain))
        kept = plain[: len(plain) - num_cut] if options.keeps_start else plain[num_cut:]
        return [*ids[:start], *kept, *ids[start + len(plain) :]]

    def _chat_ids(
        self, chat: pb.ChatInput, image_texts: Sequence[str], options: PromptOptions, limit: int | None
    ) -> list[int]:
        if self._joins_pairs and [message.role for message in chat.messages] == ["query", "document"]:
            ids, types = self.tokenizer.encode_pair(*self._pair(chat, limit), limit)
            if self._num_types == 1:
                return ids
            return [token + self._word_vocab_size * kind for token, kind in zip(ids, types, strict=True)]
        if not chat.messages:
            raise InvalidArgumentError("must not be empty", field="chat.messages")
        tools = _parse(chat.tools_json, list, "chat.tools_json")
        template = self._template_for(has_tools=tools is not None)
        if template is None:
            raise UnsupportedError("this model has no chat template", field="chat")
        variables = _parse(chat.template_variables_json, dict, "chat.template_variables_json")
        default = not options.continues_last
        render = partial(
            template.render,
            tools=tools,
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else default,
            variables=variables,
        )
        shape = self._shapes[tools is not None]
        messages = [_message(message, i, shape) for i, message in enumerate(chat.messages)]
        text = render(messages)
        if options.continues_last:
            last = len(messages) - 1
            content = text_of(chat.messages[last])
            if not content.strip():
                raise InvalidArgumentError(
                    "must have text that the output can continue", field=f"chat.messages[{last}].content"
                )
            marked = render([*messages[:last], _message(_with_mark(chat.messages[last]), last, shape)])
            text = _cut_after(text, marked, content, f"chat.messages[{last}].content")
        text = self._images.expand(text, image_texts, "chat")
        self._check_length(text, "chat")
        ids = self._text_ids(
            text, None if options.keeps_start else limit, options, adds=options.adds_special_tokens is True
        )
        if options.keeps_start and limit is not None and len(ids) > limit:
            # What follows the texts in the template would be cut off.
            raise ContextLengthError(
                f"has {len(ids)} tokens with its template; at most {limit} are possible", field="chat"
            )
        return ids

    def _template_for(self, *, has_tools: bool) -> ChatTemplate | None:
        return (self._tool_template if has_tools else None) or self._template

    def _pair(self, chat: pb.ChatInput, limit: int | None) -> tuple[str, str]:
        """Return the texts of a query and a document, for a model that reads them without a template."""
        _refuse_all_but(chat, {"messages", "add_generation_prompt"}, "chat")
        texts = []
        for i, message in enumerate(chat.messages):
            path = f"chat.messages[{i}]"
            _refuse_all_but(message, {"role", "content", "parts"}, path)
            for k, part in enumerate(message.parts):
                if part.HasField("image"):
                    raise UnsupportedError("an image cannot be scored", field=f"{path}.parts[{k}].image")
            texts.append(str(_content(message, path, MessageShape())))
            if limit is None:
                self._check_length(texts[-1], "chat")
        query, document = texts
        return query, document

    def _check_length(self, text: str, field: str) -> None:
        """Reject a text that certainly exceeds the model's context, before it is tokenized."""
        if len(text) > self._max_tokens * self.tokenizer.longest_token:
            reason = f"has {len(text)} characters; this model's maximum context length is {self._max_tokens} tokens"
            raise ContextLengthError(reason, field=field)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Give the tokenizer's errors the field that has the text."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.field:
            raise
        raise InvalidArgumentError(error.message, field=field) from None


def template_tokens(folder: ModelFolder, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that templates refer to; those that the tokenizer's files do not name are taken from
    the model's configuration.
    """
    ids = {"bos_token": folder.bos_id, "eos_token": next(iter(folder.end_ids), None), "pad_token": folder.pad_id}
    tokens = {name: tokenizer.token(value) for name, value in ids.items() if value is not None}
    return {name: token for name, token in {**tokens, **folder.special_tokens}.items() if token is not None}


def _message(message: pb.ChatMessage, index: int, shape: MessageShape) -> dict[str, object]:
    path = f"chat.messages[{index}]"
    if not message.role:
        raise InvalidArgumentError("must be set", field=f"{path}.role")
    turn: dict[str, object] = {"role": message.role, "content": _content(message, path, shape)}
    if message.tool_calls_json:
        turn["tool_calls"] = _calls(message.tool_calls_json, f"{path}.tool_calls_json", shape)
    if message.reasoning_content:
        # gpt-oss's template calls this field `thinking`.
        turn["reasoning_content"] = turn["thinking"] = message.reasoning_content
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    return turn


def _calls(calls_json: str, path: str, shape: MessageShape) -> list[object] | None:
    """Return the calls of a message, with arguments in the form that the template reads."""
    calls: list[object] | None = _parse(calls_json, list, path)
    for call in calls or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue  # in a form of the template's own
        function["arguments"] = shape.arguments(function.get("arguments"))
    return calls


def text_of(message: pb.ChatMessage) -> str:
    """Return the text that ends a message's content."""
    texts = [part.text for part in message.parts if part.HasField("text")]
    return texts[-1] if texts else message.content


def _with_mark(message: pb.ChatMessage) -> pb.ChatMessage:
    """Return a message whose text ends with _END_MARK."""
    marked = pb.ChatMessage()
    marked.CopyFrom(message)
    texts = [part for part in marked.parts if part.HasField("text")]
    if texts:
        texts[-1].text += _END_MARK
    else:
        marked.content += _END_MARK
    return marked


def _cut_after(text: str, marked: str, content: str, path: str) -> str:
    """Return a rendered conversation up to the content of its last message.

    Args:
        text: The conversation.
        marked: The conversation, rendered with _END_MARK at the end of the content.
        content: The content.
        path: Its field in the request.
    """
    before = marked[: max(marked.rfind(_END_MARK), 0)]
    # Some templates remove white space at the end.
    for kept in (before, before.rstrip()):
        if kept and text.startswith(kept):
            return kept
    # How the template changes the content depends on the content's end.
    start = text.rfind(content.strip())
    if start < 0:
        raise InvalidArgumentError("cannot be continued: the chat template changes it", field=path)
    kept = content.lstrip()
    return text[: start + len(kept if text.startswith(kept, start) else content.strip())]


def _refuse_all_but(message: Message, names: Set[str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name not in names:
            raise UnsupportedError("has no effect on the score of a pair", field=f"{path}.{field.name}")


def _content(message: pb.ChatMessage, path: str, shape: MessageShape) -> object:
    """Return the content of a message in the form that the template reads: text, a list of parts, or None."""
    if message.parts and message.content:
        raise InvalidArgumentError("must not be set together with parts", field=f"{path}.content")
    for i, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            raise InvalidArgumentError("must have a text or an image", field=f"{path}.parts[{i}]")
    if any(part.HasField("image") for part in message.parts):
        return [text_part(part.text) if part.HasField("text") else {"type": "image"} for part in message.parts]
    texts = [part.text for part in message.parts]
    if message.tool_calls_json and shape.beside_calls is None and not message.content and not any(texts):
        return None
    return shape.content(message.role, texts or message.content)


def _parse(text: str, kind: type[_T], field: str) -> _T | None:
    """Parse `text` as JSON and return the value, which must be of type `kind`; None if the text is empty."""
    if not text:
        return None
    try:
        value = json.loads(text)
        if "\\u" in text:
            # A lone surrogate is valid JSON, but not valid text.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"is not JSON: {error}", field=field) from None
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"must be a JSON {'array' if kind is list else 'object'}", field=field)
    return value
