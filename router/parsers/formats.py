"""The tool and reasoning formats by name, and the detection of a model's format from chat template or architecture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder
from router.parsers import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    hy,
    invoke,
    json_lists,
    kimi,
    kimi_k3,
    llama,
    minicpm,
    minimax_m3,
    mistral,
    pythonic,
    qwen_coder,
    solar,
)
from router.parsers.guides import CallGrammar, TaggedArguments
from router.parsers.json_calls import ReadCall, read_call, read_keyed_call
from router.parsers.machine import Machine, Offer, Script
from router.parsers.reasoning import ThinkTags, after_thinking, plain, unwrapped

_Grammar = Callable[[str], CallGrammar]
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"


def _plain_id(digest: bytes, name: str, index: int) -> str:
    return f"call_{digest.hex()[:24]}"


def _short_id(digest: bytes, name: str, index: int) -> str:
    # Mistral's templates accept no other form of id.
    number = int.from_bytes(digest, "little")
    return "".join(_BASE36[number // 36**place % 36] for place in range(9))


def _kimi_id(digest: bytes, name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def _hermes(template: str) -> CallGrammar:
    return CallGrammar("<tool_call>\n", '{"name": "NAME", "arguments": ', "}", None, "\n</tool_call>")


def _mistral(template: str) -> CallGrammar:
    if mistral.ARGS in template:
        return CallGrammar(mistral.MARK, f"NAME{mistral.ARGS}", "", None, "")
    return CallGrammar(f"{mistral.MARK}[", '{"name": "NAME", "arguments": ', "}", ", ", "]")


def _deepseek(template: str) -> CallGrammar:
    call, separator, end = deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END
    if "```json" in template:
        opening = f"{call}function{separator}NAME\n```json\n"
        return CallGrammar(deepseek.BEGIN, opening, f"\n```{end}", "\n", deepseek.END)
    return CallGrammar(deepseek.BEGIN, f"{call}NAME{separator}", end, "", deepseek.END)


def _json_calls(
    marks: Mapping[str, str], keys: tuple[str, str] = ("name", "arguments"), *, is_list: bool = True
) -> _Grammar:
    """Return the grammar of calls in an array, or of one call, after the first of the marks that the template has."""
    opening, separator, closing = ("[", ", ", "]") if is_list else ("", None, "")

    def grammar(template: str) -> CallGrammar:
        mark = next((mark for mark in marks if mark in template), next(iter(marks)))
        call = f'{{"{keys[0]}": "NAME", "{keys[1]}": '
        return CallGrammar(mark + opening, call, "}", separator, closing + marks[mark])

    return grammar


def _apertus(template: str) -> CallGrammar:
    ((begin, end),) = json_lists.APERTUS.items()
    return CallGrammar(f"{begin}[", '{"NAME": ', "}", ", ", f"]{end}")


def _solar(template: str) -> CallGrammar:
    opening = f"{solar.CALL}NUMBER{solar.NAME}NAME{solar.ARGUMENTS}"
    return CallGrammar(solar.BEGIN, opening, solar.CALL_END, "", solar.END)


def _lfm2(template: str) -> CallGrammar:
    begin, end = pythonic.LFM2
    return CallGrammar(f"{begin}[", "NAME(", ")", ", ", f"]{end}", notation={"notation": "python"})


def _olmo3(template: str) -> CallGrammar:
    begin, end = pythonic.OLMO3
    return CallGrammar(begin, "NAME(", ")", "\n", end, notation={"notation": "python"})


def _qwen_coder(tags: tuple[str, str], *, has_lines: bool) -> _Grammar:
    line = "\n" if has_lines else ""
    style = TaggedArguments(f"<parameter=KEY>{line}", f"{line}</parameter>\n", ("</parameter>", "</function>"))
    begin, end = f"{tags[0]}\n", f"\n{tags[1]}"
    return lambda template: CallGrammar(begin, "<function=NAME>\n", "</function>", None, end, style)


def _glm(template: str) -> CallGrammar:
    # GLM 4.7 and later write no line breaks.
    line = "" if "</arg_key><arg_value>" in template else "\n"
    opening, closing = f"<arg_key>KEY</arg_key>{line}<arg_value>", f"</arg_value>{line}"
    style = TaggedArguments(opening, closing, ("</arg_value>", "</tool_call>"))
    return CallGrammar("<tool_call>", f"NAME{line}", "", None, "</tool_call>", style)


def _kimi(template: str) -> CallGrammar:
    opening = f"{kimi.CALL}functions.NAME:NUMBER{kimi.ARGUMENT}"
    return CallGrammar(kimi.BEGIN, opening, kimi.CALL_END, "", kimi.END)


def _hy(template: str) -> CallGrammar:
    style = TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", ("</arg_value>", hy.CALL_END))
    call = f"{hy.CALL}NAME{hy.SEPARATOR}\n"
    return CallGrammar(f"{hy.BEGIN}\n", call, hy.CALL_END, "\n", f"\n{hy.END}", style)


def _llama(template: str) -> CallGrammar:
    begins = rf'\s*(\[\s*)?\{{\s*"({"|".join(llama.KEYS)})"'
    return CallGrammar(llama.TAG, '{"name": "NAME", "parameters": ', "}", "; ", "", bare=begins)


def _pythonic(template: str) -> CallGrammar:
    begins, notation = r"\s*\[\s*[\w.\-]+\(", {"notation": "python"}
    begin = f"{pythonic.START}["
    return CallGrammar(
        begin, "NAME(", ")", ", ", "]", bare=begins, bare_begin="[", tail=pythonic.END, notation=notation
    )


def _invocations(prefix: str, begin: str, end: str, kind: str = "") -> CallGrammar:
    opening, closing = f'<{prefix}parameter name="KEY"{kind}>', f"</{prefix}parameter>"
    call, call_end = f'<{prefix}invoke name="NAME">\n', f"</{prefix}invoke>"
    style = TaggedArguments(opening, f"{closing}\n", (closing, call_end))
    return CallGrammar(f"{begin}\n", call, call_end, "\n", f"\n{end}", style)


def _minimax(template: str) -> CallGrammar:
    return _invocations("", invoke.MINIMAX_BEGIN, invoke.MINIMAX_END)


def _dots(template: str) -> CallGrammar:
    return _invocations("", invoke.DOTS_BEGIN, invoke.DOTS_END)


def _dsml(begin: str, end: str) -> _Grammar:
    return lambda template: _invocations(invoke.DSML, begin, end, ' string="IS_STRING"')


def _gemma(marks: tuple[str, str, str]) -> _Grammar:
    begin, end, quote = marks
    notation = {"notation": "gemma", "quote": quote, "item_separator": ",", "key_separator": ":"}
    return lambda template: CallGrammar(begin, "call:NAME", "", None, end, notation=notation)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        marks: Markers that begin and end calls; if they are special tokens, the text must keep special tokens.
        ends_reasoning: How calls begin that the model writes without closing its reasoning first.
        make_id: Makes a call's id in the form that the template expects, from a 16-byte digest, the tool's name and the
            index of the call.
        grammar: Returns the grammar of calls that follow a schema, given the model's template; None if there is none.
        wrappers: Markers around the answer, which are left out of it.
    """

    script: Script
    marks: tuple[str, ...]
    ends_reasoning: tuple[str, ...] = ()
    make_id: Callable[[bytes, str, int], str] = _plain_id
    grammar: _Grammar | None = None
    wrappers: tuple[str, ...] = ()


def _json_format(
    marks: Mapping[str, str], grammar: _Grammar, wrappers: tuple[str, ...] = (), read: ReadCall = read_call
) -> ToolFormat:
    every = tuple(dict.fromkeys((*marks, *filter(None, marks.values()))))
    return ToolFormat(json_lists.after(marks, read), (*every, *wrappers), grammar=grammar, wrappers=wrappers)


def _list_format(marks: Mapping[str, str], wrappers: tuple[str, ...] = ()) -> ToolFormat:
    return _json_format(marks, _json_calls(marks), wrappers)


def _object_format(marks: Mapping[str, str]) -> ToolFormat:
    return _json_format(marks, _json_calls(marks, is_list=False))


def _hermes_format(wrappers: tuple[str, ...] = ()) -> ToolFormat:
    marks = (hermes.OPENING, hermes.CLOSING, *wrappers)
    return ToolFormat(hermes.script, marks, hermes.BEGINS, grammar=_hermes, wrappers=wrappers)


def _qwen_coder_format(tags: tuple[str, str], *, has_lines: bool) -> ToolFormat:
    script = qwen_coder.between(*tags, has_lines=has_lines)
    return ToolFormat(script, tags, qwen_coder.begins(tags[0]), grammar=_qwen_coder(tags, has_lines=has_lines))


def _dsml_format(script: Script, tags: tuple[str, str]) -> ToolFormat:
    return ToolFormat(script, (invoke.DSML,), tags[:1], grammar=_dsml(*tags))


_RESPONSE = ("<response>", "</response>")
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _hermes_format(),
    "ernie45": _hermes_format(_RESPONSE),
    "granite": _list_format(json_lists.GRANITE, _RESPONSE),
    "phi4_mini_json": _list_format(json_lists.PHI4_MINI),
    "hunyuan_a13b": _list_format(json_lists.HUNYUAN),
    "nemotron_json": _list_format(json_lists.NEMOTRON),
    "apertus": _json_format(json_lists.APERTUS, _apertus, read=read_keyed_call),
    "granite-20b-fc": _object_format(json_lists.GRANITE_20B),
    "gigachat3": _object_format(json_lists.GIGACHAT),
    "internlm": _object_format(json_lists.INTERNLM),
    "solar_open": ToolFormat(
        solar.script,
        (solar.BEGIN, solar.END, solar.CALL, solar.NAME, solar.ARGUMENTS, solar.CALL_END, *solar.WRAPPERS),
        grammar=_solar,
        wrappers=solar.WRAPPERS,
    ),
    "cohere_command": _json_format(
        json_lists.COMMAND,
        _json_calls(json_lists.COMMAND, ("tool_name", "parameters")),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "lfm2": ToolFormat(pythonic.between(*pythonic.LFM2), pythonic.LFM2, grammar=_lfm2),
    "olmo3": ToolFormat(pythonic.between(*pythonic.OLMO3), pythonic.OLMO3, grammar=_olmo3),
    "llama3_json": ToolFormat(llama.script, (llama.TAG,), grammar=_llama),
    "pythonic": ToolFormat(pythonic.script, (pythonic.START, pythonic.END), grammar=_pythonic),
    "mistral": ToolFormat(mistral.script, (mistral.MARK, mistral.CALL_ID, mistral.ARGS), (), _short_id, _mistral),
    "qwen3_coder": _qwen_coder_format(qwen_coder.QWEN, has_lines=True),
    "seed_oss": _qwen_coder_format(qwen_coder.SEED_OSS, has_lines=False),
    "deepseek_v3": ToolFormat(
        deepseek.script,
        (deepseek.BEGIN, deepseek.END, deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END),
        (deepseek.BEGIN,),
        grammar=_deepseek,
    ),
    "deepseek_v32": _dsml_format(invoke.deepseek_v32, (invoke.DSML_BEGIN, invoke.DSML_END)),
    "deepseek_v4": _dsml_format(invoke.deepseek_v4, (invoke.DSML4_BEGIN, invoke.DSML4_END)),
    "dots": ToolFormat(
        invoke.dots, (invoke.DOTS_BEGIN, invoke.DOTS_END), (invoke.DOTS_BEGIN,), grammar=_dots
    ),
    "kimi_k2": ToolFormat(
        kimi.script,
        (kimi.BEGIN, kimi.END, kimi.CALL, kimi.ARGUMENT, kimi.CALL_END),
        (kimi.BEGIN, kimi.CALL),
        _kimi_id,
        _kimi,
    ),
    "kimi_k3": ToolFormat(
        kimi_k3.script, kimi_k3.MARKS, (kimi_k3.BEGIN,), wrappers=kimi_k3.WRAPPERS
    ),
    "hy_v3": ToolFormat(hy.script, hy.MARKS, (hy.BEGIN,), grammar=_hy),
    "minicpm5": ToolFormat(minicpm.script, (*minicpm.BEGINS, minicpm.END), minicpm.BEGINS),
    "minimax_m3": ToolFormat(minimax_m3.script, (minimax_m3.MARK,), (minimax_m3.BEGIN,)),
    "glm45": ToolFormat(glm.script, glm.MARKS, grammar=_glm),
    "openai": ToolFormat(harmony.script, harmony.MARKS),
    "functiongemma": ToolFormat(
        gemma.function_gemma, gemma.FUNCTION_GEMMA, (gemma.FUNCTION_GEMMA[0],), grammar=_gemma(gemma.FUNCTION_GEMMA)
    ),
    "gemma4": ToolFormat(
        gemma.gemma4,
        gemma.GEMMA4,
        (gemma.GEMMA4[0],),
        grammar=_gemma(gemma.GEMMA4),
        wrappers=gemma.EMPTY_THOUGHTS,
    ),
    "minimax_m2": ToolFormat(
        invoke.minimax, (invoke.MINIMAX_BEGIN, invoke.MINIMAX_END), (invoke.MINIMAX_BEGIN,), grammar=_minimax
    ),
}  # fmt: skip
# gpt-oss writes its reasoning in a channel: one parser handles both calls and reasoning.
REASONING_FORMATS: dict[str, ThinkTags | None] = {
    "think": ThinkTags("<think>", "</think>"),
    "deepseek_r1": ThinkTags("<think>", "</think>", is_always_open=True),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "solar_open": ThinkTags("<|think|>", "<|end|>"),
    "apriel": ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "cohere_command": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi_k3": ThinkTags(*kimi_k3.THINKING),
    "minimax_m3": ThinkTags(*minimax_m3.THINKING),
    "gemma4": ThinkTags("<|channel>thought", "<channel|>"),
    "openai": None,
}


@dataclass(frozen=True, slots=True)
class _Row:
    """Rule that selects a format: by architecture, or by text that the template must or must not contain."""

    name: str
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


# The first matching rule applies.
_TOOL_ROWS = (
    _Row("openai", ("<|channel|>", "<|message|>"), architectures=("gpt_oss",)),
    _Row("deepseek_v4", (invoke.DSML4_BEGIN,)),
    _Row("deepseek_v4", ("｜DSML｜", "tool_calls>"), lacks=("function_calls>",)),
    _Row("deepseek_v32", ("｜DSML｜",)),
    _Row("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    _Row("kimi_k2", (kimi.BEGIN,)),
    _Row("kimi_k3", kimi_k3.MARKS),
    _Row("minimax_m3", (minimax_m3.MARK,)),
    _Row("hy_v3", (hy.SEPARATOR, "<arg_key>")),
    _Row("minicpm5", ("<function name=", "<param name=")),
    _Row("minimax_m2", (invoke.MINIMAX_BEGIN,), architectures=("minimax_m2",)),
    _Row("glm45", ("<tool_call>", "<arg_key>"), architectures=("glm4_moe",)),
    _Row("qwen3_coder", ("<tool_call>", "<function=")),
    _Row("seed_oss", ("<seed:tool_call>",)),
    _Row("gemma4", ("<|tool_call>",)),
    _Row("cohere_command", ("<|START_ACTION|>",)),
    _Row("lfm2", ("<|tool_call_start|>",)),
    _Row("lfm2", ("<|tool_list_start|>",), architectures=("lfm2", "lfm2_moe")),
    _Row("solar_open", (solar.BEGIN,)),
    _Row("apertus", ("<|tools_prefix|>",)),
    _Row("gigachat3", ("<|function_call|>", "<|role_sep|>")),
    _Row("gigachat3", ("function call", "<|role_sep|>")),
    _Row("granite-20b-fc", ("<function_call>",)),
    _Row("internlm", ("<|action_start|>", "<|plugin|>")),
    _Row("olmo3", ("<function_calls>",)),
    _Row("dots", (invoke.DOTS_BEGIN,)),
    _Row("hunyuan_a13b", ("<tool_calls>",)),
    _Row("nemotron_json", ("<TOOLCALL>",)),
    _Row("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    _Row("granite", ("<|tool_call|>",)),
    _Row("functiongemma", ("<start_function_call>",)),
    _Row("ernie45", ("<tool_call>", "<response>")),
    _Row("hermes", ("<tool_call>",)),
    _Row("mistral", ("[TOOL_CALLS]",)),
    _Row("pythonic", ("<|python_start|>",)),
    _Row("pythonic", ("[func_name1(",)),
    _Row("llama3_json", ("<|python_tag|>",)),
    _Row("llama3_json", ("tools", '"parameters"')),
)
_REASONING_ROWS = (
    _Row("openai", ("<|channel|>", "<|message|>"), architectures=("gpt_oss",)),
    _Row("gemma4", ("<|channel>", "<channel|>")),
    _Row("kimi_k3", kimi_k3.MARKS),
    _Row("minimax_m3", (minimax_m3.THINKING[1],)),
    _Row("mistral", ("[THINK]",)),
    _Row("seed_oss", ("</seed:think>",)),
    _Row("cohere_command", ("<|END_THINKING|>",)),
    _Row("solar_open", ("<|begin|>assistant", "<|think|>")),
    _Row("apriel", ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    _Row("deepseek_r1", ("</think>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"), lacks=("thinking",)),
    _Row("think", ("</think>",)),
)


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How the served model writes tool calls and reasoning; None means unknown, so that all text is the answer."""

    tools: ToolFormat | None = None
    reasoning: ThinkTags | None = None
    has_channels: bool = False

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.has_channels or self.reasoning is not None

    @property
    def marks(self) -> tuple[str, ...]:
        """Markers that begin and end calls and reasoning."""
        tools = self.tools.marks if self.tools else ()
        reasoning = (self.reasoning.opening, self.reasoning.closing) if self.reasoning else ()
        return (*tools, *reasoning, *(harmony.MARKS if self.has_channels else ()))

    def parser(self, offer: Offer) -> Machine:
        """Return a parser for one sequence's text."""
        if self.has_channels:
            return Machine(harmony.script, offer)
        reads_calls = self.tools is not None and offer.tools
        wrappers = self.tools.wrappers if self.tools else ()
        answer = self.tools.script if self.tools and reads_calls else unwrapped if wrappers else plain
        if self.reasoning is None:
            return Machine(answer, offer, wrappers)
        ends = self.tools.ends_reasoning if self.tools and reads_calls else ()
        return Machine(after_thinking(self.reasoning, answer, ends), offer, wrappers)

    def call_id(self, request_id: str, sequence: int, index: int, name: str) -> str:
        """Return an id for a call without one; deterministic, so that parsing the text again gives the same id."""
        digest = hashlib.blake2b(f"{request_id}/{sequence}/{index}".encode(), digest_size=16).digest()
        return (self.tools.make_id if self.tools else _plain_id)(digest, name, index)


def format_of(folder: ModelFolder, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ModelFormat:
    """Return a model's format: the configured one, or the detected one. Raises ConfigError for an unknown name."""
    tools = _choose(tool_parser, "tool_parser", tuple(TOOL_FORMATS), _TOOL_ROWS, folder)
    reasoning = _choose(reasoning_parser, "reasoning_parser", tuple(REASONING_FORMATS), _REASONING_ROWS, folder)
    has_channels = "openai" in (tools, reasoning)
    return ModelFormat(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning), has_channels)


def _choose(name: str, field: str, names: tuple[str, ...], rows: tuple[_Row, ...], folder: ModelFolder) -> str:
    if name == "auto":
        template = folder.templates
        fits = (row.name for row in rows if _fits(row, template, folder.architecture))
        return next(fits, "none")
    if name != "none" and name not in names:
        raise ConfigError(f"{name!r} must be one of auto, none, {', '.join(names)}", field=field)
    return name


def _fits(row: _Row, template: str, architecture: str) -> bool:
    if architecture in row.architectures:
        return True
    return all(mark in template for mark in row.contains) and not any(mark in template for mark in row.lacks)
