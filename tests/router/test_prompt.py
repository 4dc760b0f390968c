"""Conversion of text, tokens and conversations to prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from midstream.errors import ConfigError, InvalidArgumentError, UnsupportedError
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.pipeline import prompt
from router.pipeline.chat_template import ChatTemplate
from router.pipeline.prompt import PromptBuilder, PromptOptions


@pytest.fixture(scope="module")
def builder(folder: ModelFolder) -> Iterator[PromptBuilder]:
    builder = PromptBuilder(folder, 1)
    yield builder
    builder.close()


async def test_text_and_tokens(builder: PromptBuilder, tokenizer: Tokenizer) -> None:
    long = "some words, again and again " * 100
    assert await builder.token_ids(pb.GenerateRequest(prompt="Hello there")) == tokenizer.encode("Hello there")
    assert await builder.token_ids(pb.GenerateRequest(prompt=long)) == tokenizer.encode(long)
    assert await builder.token_ids(pb.GenerateRequest(token_ids=pb.TokenIds(values=[5, 6]))) == [5, 6]


@pytest.mark.parametrize(("num_processors", "both_at_once"), [(2, False), (3, True)])
async def test_prompts_of_one_client_leave_a_processor_to_others(
    num_processors: int, both_at_once: bool, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt, "num_compute_threads", lambda: num_processors)
    met, barrier = [], threading.Barrier(2, timeout=240 if both_at_once else 0.2)

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            barrier.reset()
        else:
            met.append(text)
        return [1]

    with closing(PromptBuilder(folder, 2)) as builder:
        monkeypatch.setattr(builder.tokenizer, "encode", encode)
        requests = [pb.GenerateRequest(prompt=f"{number} " + "words " * 100) for number in range(2)]
        await asyncio.gather(*(builder.token_ids(request) for request in requests))
    assert len(met) == 2 * both_at_once


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text, is_enough, num_encodings = "so the stream goes on " * 20_000, threading.Event(), 0

    def encode() -> None:
        nonlocal num_encodings
        while not is_enough.is_set() and num_encodings < 20:  # the main thread might not run during the first call
            num_encodings += 1
            tokenizer.encode(text)

    thread = threading.Thread(target=encode)
    thread.start()
    turns = Counter[int]()
    while thread.is_alive():
        time.sleep(0.001)
        turns[num_encodings] += 1
        if turns[num_encodings] > 4:
            is_enough.set()
    # If encoding blocked other threads, this thread would run only before and after it.
    assert max(turns.values()) > 4


async def test_a_conversation_is_rendered_with_the_models_template(
    builder: PromptBuilder, tokenizer: Tokenizer
) -> None:
    turns = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi")]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    ids = await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=turns)))
    assert ids == tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False)
    chat = pb.ChatInput(messages=turns, add_generation_prompt=False)
    assert await builder.token_ids(pb.GenerateRequest(chat=chat)) == tokenizer.encode(text, add_special_tokens=False)


async def test_the_output_can_continue_the_last_message(builder: PromptBuilder, tokenizer: Tokenizer) -> None:
    """As with transformers' `continue_final_message`, white space at the end is kept if the template keeps it."""
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    turns = [pb.ChatMessage(role="user", content="Hi"), pb.ChatMessage(role="assistant", content="Hi, assistant ")]
    options = PromptOptions(continues_last=True)
    ids = await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=turns)), options)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(start + "Hi, assistant ")
    turns[1].content = " "
    with pytest.raises(InvalidArgumentError) as raised:
        await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=turns)), options)
    assert raised.value.field == "chat.messages[1].content"


@pytest.mark.parametrize("content", ["<", "|", "end", "im_end|>", "user"])
async def test_a_continued_message_may_have_the_text_of_the_templates_marks(
    builder: PromptBuilder, tokenizer: Tokenizer, content: str
) -> None:
    turns = [pb.ChatMessage(role="user", content="Hi"), pb.ChatMessage(role="assistant", content=content)]
    options = PromptOptions(continues_last=True)
    ids = await builder.token_ids(pb.GenerateRequest(chat=pb.ChatInput(messages=turns)), options)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(f"Hi<|im_end|>\n<|im_start|>assistant\n{content}")


async def test_a_prompt_is_truncated_to_its_end(builder: PromptBuilder, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four five")
    request = pb.GenerateRequest(prompt="one two three four five", max_tokens=8190)
    for limit, kept in ((3, 3), (-1, 2), (99, len(ids))):
        assert await builder.token_ids(request, PromptOptions(max_tokens=limit)) == ids[-kept:]
    tokens = pb.GenerateRequest(token_ids=pb.TokenIds(values=ids))
    assert await builder.token_ids(tokens, PromptOptions(max_tokens=3)) == ids[-3:]


async def test_special_tokens_are_optional_and_survive_a_truncation(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(character) for character in text]
        return [1, *ids, 2] if add_special_tokens else ids

    monkeypatch.setattr(builder.tokenizer, "encode", encode)
    request = pb.GenerateRequest(prompt="abcd")
    for options, ids in (
        (PromptOptions(), [1, *b"abcd", 2]),
        (PromptOptions(adds_special_tokens=False), [*b"abcd"]),
        (PromptOptions(max_tokens=4), [1, *b"cd", 2]),
        (PromptOptions(adds_special_tokens=False, max_tokens=3), [*b"bcd"]),
    ):
        assert await builder.token_ids(request, options) == ids


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("input", pb.GenerateRequest()),
        ("prompt", pb.GenerateRequest(prompt="")),
        ("prompt", pb.GenerateRequest(prompt="x" * 3_000_000)),
        ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
        ("chat.messages", pb.GenerateRequest(chat=pb.ChatInput())),
        ("chat.messages[0].role", pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(content="x")]))),
        (
            "chat.tools_json",
            pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")], tools_json="{}")),
        ),
        (
            "chat.tools_json",
            pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")], tools_json="[" * 100_000)),
        ),
        (
            "chat.template_variables_json",
            pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="u")], template_variables_json="[1]")),
        ),
    ],
)
async def test_a_bad_input_is_refused_by_name(builder: PromptBuilder, field: str, request_: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        await builder.token_ids(request_)
    assert raised.value.field == field


@pytest.fixture(scope="module")
def pairs(folder: ModelFolder) -> Iterator[PromptBuilder]:
    """Return a prompt builder for a classifier, which reads a query and a document without a template."""
    config = folder.config | {"architectures": ["LlamaForSequenceClassification"]}
    builder = PromptBuilder(dataclasses.replace(folder, config=config), 1)
    yield builder
    builder.close()


def pair(**document: Any) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="query", content="q"), pb.ChatMessage(role="document", **document)]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=messages))


async def test_the_parts_of_a_pair_are_scored(pairs: PromptBuilder, tokenizer: Tokenizer) -> None:
    parts = [pb.ContentPart(text="some"), pb.ContentPart(text="words")]
    ids = await pairs.token_ids(pair(parts=parts))
    assert ids == await pairs.token_ids(pair(content="some\nwords")) == tokenizer.encode_pair("q", "some\nwords")[0]


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"parts": [pb.ContentPart(image=pb.Image(data=b"x"))]}, "parts[0].image.data"),
        ({"parts": [pb.ContentPart()]}, "parts[0]"),
        ({"parts": [pb.ContentPart(text="a")], "content": "b"}, "content"),
        ({"content": "b", "name": "c"}, "name"),
        ({"content": "b", "reasoning_content": "c"}, "reasoning_content"),
    ],
)
async def test_what_cannot_be_scored_is_refused(pairs: PromptBuilder, document: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
        await pairs.token_ids(pair(**document))
    assert raised.value.field == f"chat.messages[1].{field}"


async def test_bad_words_are_tokenized_with_and_without_a_space(builder: PromptBuilder, tokenizer: Tokenizer) -> None:
    expected = [tokenizer.encode("cat"), tokenizer.encode(" cat")]
    assert await builder.bad_word_ids(["cat"]) == expected
    assert await builder.bad_word_ids([]) == []


def test_a_template_sees_what_templates_expect() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}"
        "{{ m.content }}{% endfor %}"
        "{{ tools | tojson }}{{ mood }}{% if add_generation_prompt %}>{% endif %}{{ range(3) | list }}"
    )
    turns = [{"role": "user", "content": text} for text in "abc"]
    with closing(ChatTemplate(source, {"bos_token": "<s>"})) as template:
        text = template.render(turns, tools=[{"name": "<é>"}], variables={"mood": "!"})
    assert text == '<s>ab[{"name": "<é>"}]!>[0, 1, 2]'


@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}], ids=["unchanged", "lower"])
@pytest.mark.parametrize("size", [1, 300])
async def test_a_text_for_which_the_tokenizer_has_no_tokens_is_refused(
    folder: ModelFolder, tmp_path: Path, normalizer: dict[str, str] | None, size: int
) -> None:
    vocabulary = {"hi": 0, "ho": 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    spec = json.loads(tokenizer.to_str()) | {"normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    model = dataclasses.replace(folder, path=tmp_path, chat_template="{{ messages[0].content }}")
    with closing(PromptBuilder(model, 1)) as builder:
        assert await builder.token_ids(pb.GenerateRequest(prompt="hi ho")) == [0, 1]
        chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="ha " * size)])
        for request, field in (
            (pb.GenerateRequest(prompt="ha " * size), "prompt"),
            (pb.GenerateRequest(chat=chat), "chat"),
        ):
            with pytest.raises(InvalidArgumentError, match="cannot be tokenized by this model") as raised:
                await builder.token_ids(request)
            assert raised.value.field == field
        with pytest.raises(InvalidArgumentError, match="cannot be tokenized by this model") as raised:
            await builder.bad_word_ids(["ha"])
        assert raised.value.field == "stopping.bad_words"


async def chat_text(folder: ModelFolder, tools: str = "", template_variables: str = "") -> str:
    """Return the prompt of a conversation as text."""
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hi")], tools_json=tools)
    chat.template_variables_json = template_variables
    with closing(PromptBuilder(folder, 1)) as builder:
        ids = await builder.token_ids(pb.GenerateRequest(chat=chat))
        return builder.tokenizer.decode(ids, skip_special_tokens=False)


async def test_conversations_with_tools_use_the_template_for_them(folder: ModelFolder) -> None:
    model = dataclasses.replace(folder, chat_template="plain", tool_template="{{ tools | length }} tools")
    assert [await chat_text(model), await chat_text(model, "[{}]")] == ["plain", "1 tools"]
    assert await chat_text(dataclasses.replace(model, tool_template=None), "[{}]") == "plain"


SPECIAL_TOKENS = [
    {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "unk_token": "<|im_end|>"},
    {"bos_token": None, "eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}},
    {"eos_token": "<|im_end|>", "sep_token": "<|im_start|>", "mask_token": "<|im_end|>", "cls_token": "<|im_start|>"},
]


@pytest.mark.parametrize("declared", SPECIAL_TOKENS)
async def test_templates_get_the_special_tokens_that_transformers_gives_them(
    declared: dict[str, object], folder: ModelFolder, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder.path / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **declared}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(folder.config | {"bos_token_id": None}), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")
    source = "|".join(f"{{{{ {name} }}}}" for name in names)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "Hi"}]
    expected = library.apply_chat_template(turns, chat_template=source, tokenize=False)
    model = dataclasses.replace(open_model_folder(str(tmp_path)), chat_template=source)
    assert await chat_text(model) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools_json", r'[{"name": "\ud83d"}]'), ("template_variables_json", r'{"x": "\ude00 \ud83d"}')],
)
async def test_half_of_a_surrogate_pair_is_refused(builder: PromptBuilder, field: str, value: str) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hi")])
    setattr(chat, field, value)
    with pytest.raises(InvalidArgumentError) as raised:
        await builder.token_ids(pb.GenerateRequest(chat=chat))
    assert raised.value.field == f"chat.{field}"
    setattr(chat, field, value.replace(r"\ud83d", r"\ud83d\ude00").replace(r"\ude00 ", ""))
    assert await builder.token_ids(pb.GenerateRequest(chat=chat))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% generation %}{{ m.content }} {% endgeneration %}{% endfor %}",
        "{%- for m in messages -%}\n  {%- generation -%}  {{ m.role }}\n{%- endgeneration %}\n{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ tools | tojson(true) }}{{ tools | tojson(indent=2) }}{{ tools | tojson(false, '\t') }}",
        "{% set comma = joiner(', ') %}{% for m in messages %}{{ comma() }}{{ m.role }}{% endfor %}",
        "{% set turn = cycler('a', 'b') %}{{ turn.next() }}{{ turn.next() }}{{ turn.next() }}",
        "{{ documents is defined }}{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}",
    ],
)
def test_a_template_gives_the_text_of_transformers(source: str) -> None:
    turns = [{"role": "user", "content": "Hi <é>"}, {"role": "assistant", "content": "Ho"}]
    tools: list[dict[Any, Any]] = [{"type": "function", "function": {"name": "é", "description": "<b>"}}]
    (expected,), _ = render_jinja_template([turns], tools=tools, chat_template=source, add_generation_prompt=True)
    with closing(ChatTemplate(source, {})) as template:
        assert template.render(turns, tools=tools) == expected


def test_a_conversation_waits_for_a_process_and_gets_its_own_answer() -> None:
    with closing(ChatTemplate("{{ messages[0].content }}", {}, 2)) as template, ThreadPoolExecutor(8) as threads:
        texts = [f"text {i} " * 100 for i in range(64)]
        assert list(threads.map(lambda text: template.render([{"content": text}]), texts)) == texts


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% include 'y' %}{% endif %}", "(" * 100 + "{{" + "(" * 9999])
def test_a_template_that_does_not_compile_is_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="compile"):
        ChatTemplate(source, {})
