"""Reports what a router makes of a model folder: its tokenizer and chat template. Run by `midstream check`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from midstream.errors import MidstreamError
from midstream.model.facts import Fact, Use, print_facts
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from router.pipeline.answers import answers_of
from router.pipeline.chat_template import ChatTemplate
from router.pipeline.generation_defaults import generation_defaults, ignored_settings, used_settings
from router.pipeline.prompt import template_tokens

_SYSTEM, _TOOL = "a word of the system message", "a_tool_of_the_request"
_USER = {"role": "user", "content": "hello"}
_TOOLS: list[object] = [
    {"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": {"type": "object"}}}
]


def facts_of(folder: ModelFolder) -> Iterator[Fact]:
    """Yield what a router finds out about `folder`."""
    yield from _generation(folder)
    try:
        tokenizer = Tokenizer(folder.path)
    except MidstreamError as error:
        yield Fact("tokenizer", Use.REFUSED, error.message)
        return
    yield Fact("tokenizer", Use.USED, f"{tokenizer.vocab_size:,} tokens; a text alone gets {_added(tokenizer)}")
    for name, source in (("chat template", folder.chat_template), ("chat template for tools", folder.tool_template)):
        if source is not None:
            yield from _template(name, source, folder, tokenizer)
    if folder.chat_template is None:
        yield Fact("chat template", Use.IGNORED, "there is none, so chats are refused")
    if answers_of(folder) is not None:
        yield Fact("scores", Use.USED, "of its classes, or of the tokens in 1_LogitScore/config.json")


def _generation(folder: ModelFolder) -> Iterator[Fact]:
    name = "generation_config.json"
    try:
        generation_defaults(folder)
    except MidstreamError as error:
        yield Fact(name, Use.REFUSED, error.message)
        return
    if used := used_settings(folder.generation_config):
        yield Fact(name, Use.USED, ", ".join(used))
    for setting in ignored_settings(folder.generation_config):
        yield Fact(f"{name}: {setting}", Use.IGNORED, "has no effect")


def _added(tokenizer: Tokenizer) -> str:
    """Return which special tokens are added to a text."""
    bare, full = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    place = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    parts = ((full[:place], "before"), (full[place + len(bare) :], "after"))
    shown = [f"{' '.join(str(tokenizer.token(i)) for i in ids)} {where} it" for ids, where in parts if ids]
    return " and ".join(shown) or "no special tokens"


def _template(name: str, source: str, folder: ModelFolder, tokenizer: Tokenizer) -> Iterator[Fact]:
    try:
        template = ChatTemplate(source, template_tokens(folder, tokenizer))
    except MidstreamError as error:
        yield Fact(name, Use.REFUSED, error.message)
        return
    try:
        template.render([_USER])
        system = _shown(template, _SYSTEM, [{"role": "system", "content": _SYSTEM}, _USER])
        tools = _shown(template, _TOOL, [_USER], _TOOLS)
        yield Fact(name, Use.USED, f"system messages are {system}; tools are {tools}")
    except MidstreamError as error:
        yield Fact(name, Use.REFUSED, f"fails for a message of a user: {error.message}")
    finally:
        template.close()


def _shown(template: ChatTemplate, mark: str, messages: list[dict[str, str]], tools: list[object] | None = None) -> str:
    """Return whether `mark`, which is part of the messages or tools, is shown to the model."""
    try:
        return "shown" if mark in template.render(messages, tools=tools) else "not shown"
    except MidstreamError as error:
        return f"refused: {error.message}"


if __name__ == "__main__":
    print_facts(facts_of(open_model_folder(sys.argv[1])))
