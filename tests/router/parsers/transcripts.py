"""Model output in each format, as the format's chat template writes it, and the parsed contents."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from router.parsers.events import CallArguments, CallBegin, Event, ReasoningDelta, TextDelta
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat
from router.parsers.machine import Machine, Offer, Schema

SCHEMAS: dict[str, Schema] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "near": {"type": "array", "items": {"type": "string"}},
        },
    },
    "time": {"type": "object", "properties": {}},
    "write-file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}
# A call of the format qwen3_coder up to its first value.
OPEN_VALUE = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo"
OFFER = Offer(SCHEMAS)
Named = tuple[str, dict[str, object]]
OSLO: Named = ("weather", {"city": "Oslo", "days": 3, "hourly": True})
TOKYO: Named = ("weather", {"city": "東京 🗼", "near": ["横浜", "a ] b"]})
NOW: Named = ("time", {})
CODE: Named = ("write-file", {"path": "a.py", "text": 'if x < 3:\n    print("{[<b>]}")\n'})


# Half of a surrogate pair is valid JSON, but not valid text.
LONE = r'{"path": "\ud83d\uD83D\ude00", "text": "\\ud83d", "\udc00": "\ude00\ud83d"}'
MENDED: Named = ("write-file", {"path": "\ufffd😀", "text": "\\ud83d", "\ufffd": "\ufffd\ufffd"})


@dataclass(frozen=True)
class Transcript:
    """The text that a model writes, and its parsed contents.

    Attributes:
        tools: Name of the tool-call format.
        reasons_by: Name of the reasoning format.
        is_thinking: Whether the prompt has opened a reasoning block.
    """

    tools: str
    text: str
    content: str = ""
    calls: list[Named] = field(default_factory=list)
    reasoning: str = ""
    reasons_by: str = "none"
    is_thinking: bool = False
    ids: tuple[str | None, ...] = ()

    def parser(self, *, max_calls: int | None = None) -> Machine:
        return model_format(self.tools, self.reasons_by).parser(Offer(SCHEMAS, max_calls, self.is_thinking))


def model_format(tools: str, reasoning: str = "none") -> ModelFormat:
    return ModelFormat(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning), "openai" in (tools, reasoning))


def summary(events: list[Event]) -> tuple[str, str, list[Named]]:
    """Return the content, the reasoning and the tool calls."""
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = ["" for _ in names]
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    return content, reasoning, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def _json(call: Named, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _call(arguments: str) -> str:
    """Return a call of `write-file` whose arguments are JSON text."""
    return f'{{"name": "write-file", "arguments": {arguments}}}'


def _hermes(*calls: Named) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)


GOOD = [
    Transcript("hermes", "Just text, 1 < 2 <tool", "Just text, 1 < 2 <tool"),
    Transcript("hermes", "See:\n\n" + _hermes(OSLO, TOKYO), "See:", [OSLO, TOKYO]),
    Transcript("hermes", _hermes(CODE) + "\nDone.", "Done.", [CODE]),
    Transcript("hermes", f"<tool_call>{_json(NOW)}", "", [NOW]),
    Transcript(
        "hermes",
        f'<tool_call>{{"name": "rm", "arguments": {{"x": "y}}}}</tool_call>\n{_hermes(OSLO, CODE)}\nDone.',
        '<tool_call>{"name": "rm", "arguments": {"x": "y}}</tool_call>\nDone.',
        [OSLO, CODE],
    ),
    Transcript("hermes", f"<tool_call>{_call(LONE)}</tool_call>", "", [MENDED]),
    Transcript(
        "hermes", f'<tool_call>{{"name": "write-file", "arguments": {json.dumps(LONE)}}}</tool_call>', "", [MENDED]
    ),
    Transcript("llama3_json", f"[{_call(LONE)}, ", "", [MENDED]),
    Transcript("mistral", f"[TOOL_CALLS]write-file[ARGS]{LONE}", "", [MENDED]),
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>One. <|end|><|start|>assistant<|channel|>analysis<|message|><|end|><|start|>"
        "assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>final<|message|>Done.\n<|end|><|start|>assistant to=functions.rm"
        "<|channel|>commentary<|message|>{}<|call|>",
        "I look.\n\nDone.\n\n\n{}",
        [],
        "One. \n\nTwo.",
    ),
    Transcript("openai", f"<|channel|>commentary to=functions.write-file<|message|>{LONE}<|call|>", "", [MENDED]),
    Transcript(
        "qwen3_coder",
        '<function=weather>\n<parameter=near>\n["\\udE00\\uD83d"]\n</parameter>\n</function>',
        "",
        [("weather", {"near": ["\ufffd\ufffd"]})],
    ),
    Transcript(
        "hermes",
        '<tool_call>\n{"name": "write-file", "arguments": {"path": "x", "text": "</tool_call>"}}\n</tool_call>',
        "",
        [("write-file", {"path": "x", "text": "</tool_call>"})],
    ),
    # Calls whose ends are left out, and text between calls.
    Transcript(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_begin|>"
        'functions.weather:1<|tool_call_argument_begin|>{"days": 3}<|tool_calls_section_end|>Done.',
        "Done.",
        [NOW, ("weather", {"days": 3})],
        ids=("functions.time:0", "functions.weather:1"),
    ),
    Transcript(
        "minimax_m2",
        '<minimax:tool_call><invoke name="time"></invoke>And then <invoke name="time"></invoke></minimax:tool_call>',
        "And then ",
        [NOW, NOW],
    ),
    Transcript(
        "hy_v3",
        "I look.<tool_calls><tool_call>time<tool_sep></tool_call><tool_call>weather<tool_sep><arg_key>days</arg_key>"
        "<arg_value>3</arg_value><arg_key>city</arg_key><arg_value></tool_call></arg_value></tool_call></tool_calls>",
        "I look.",
        [NOW, ("weather", {"days": 3, "city": "</tool_call>"})],
    ),
    # A call without a section.
    Transcript("hy_v3", "<tool_call>time<tool_sep>\n</tool_call>", "", [NOW]),
    Transcript(
        "kimi_k3",
        '<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" '
        'index="1"<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|open|>argument '
        'key="a &quot;&amp;quot;" type="string"<|sep|> 7 &amp; <|close|>argument<|sep|><|close|>call<|sep|><|close|>'
        "tools<|sep|><|close|>message<|sep|>",
        "I look.",
        [("weather", {"days": 3, 'a "&quot;': " 7 &amp; "})],
        reasons_by="kimi_k3",
    ),
    Transcript(
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>",
        "Hi",
        reasoning="Hm.",
        reasons_by="kimi_k3",
    ),
    # The prompt has opened the reasoning.
    Transcript(
        "kimi_k3",
        'Hm.<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="time" index="1"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        "",
        [NOW],
        "Hm.",
        "kimi_k3",
        is_thinking=True,
    ),
    # A value that is not the JSON that it should be stays a text.
    Transcript(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="weather"<|sep|><|open|>argument key="days" type="number"<|sep|>x'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        "",
        [("weather", {"days": "x"})],
    ),
    Transcript(
        "minicpm5",
        '<function name="weather"><param name="city">A &amp; B&lt;</param><param name="days">3</param></function>\n'
        '<function name="write-file"><param name="text"><![CDATA[  </param> &amp;\n]]></param></function>',
        "",
        [("weather", {"city": "A & B<", "days": 3}), ("write-file", {"text": "  </param> &amp;\n"})],
    ),
    # Text that is no XML is read as it is, and arguments in one that the tool does not have are these.
    Transcript(
        "minicpm5",
        '<functionname="weather"><paramname="city"> a < b &amp; c </param></function>'
        '<function name="weather"><param name="properties">{"city": "Oslo"}</param></function>',
        "",
        [("weather", {"city": "a < b &amp; c"}), ("weather", {"city": "Oslo"})],
    ),
    Transcript(
        "minimax_m3",
        "<mm:think>Hm.</mm:think>I look."
        "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name='weather'>]<]minimax[>[<days>3"
        "]<]minimax[>[</days>]<]minimax[>[<near>]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>[<item>b]<]minimax[>["
        "</item>]<]minimax[>[</near>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=weather>]<]minimax[>[<near>"
        "]<]minimax[>[</near>]<]minimax[>[<other>]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[<x>2]<]minimax[>[</x>"
        "]<]minimax[>[</other>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
        "I look.",
        [("weather", {"days": 3, "near": ["a", "b"]}), ("weather", {"near": [], "other": {"x": [1, 2]}})],
        "Hm.",
        "minimax_m3",
    ),
    Transcript("hermes", f"<think>\nOslo it is.\n</think>\n\n{_hermes(OSLO)}", "", [OSLO], "Oslo it is.", "think"),
    Transcript("hermes", f"Hm.\n</think>\n\nYes.\n{_hermes(NOW)}", "Yes.", [NOW], "Hm.", "think", is_thinking=True),
    Transcript("hermes", "<think>\n\n</think>\n\nHi", "Hi", reasons_by="think"),
    # The prompt has closed the reasoning, and the model closes it again.
    Transcript("hermes", f"</think>\n\n{_hermes(NOW)}", "", [NOW], reasons_by="think"),
    Transcript("hermes", "\n</think>Hi </think>.", "Hi </think>.", reasons_by="think"),
    # Qwen 3 and 3.5 sometimes call without closing the reasoning, or close it after the call.
    Transcript("hermes", f"Now.\n{_hermes(NOW)}", "", [NOW], "Now.", "think", is_thinking=True),
    Transcript("hermes", f"<think>Now.\n{_hermes(OSLO)}\n</think>\n\nDone.", "Done.", [OSLO], "Now.", "think"),
    Transcript("hermes", "A <tool_call> helps.</think>Hi", "Hi", [], "A <tool_call> helps.", "think", is_thinking=True),
    Transcript(
        "qwen3_coder",
        "Look.\n\n<tool_call>\n<function=time>\n</function>\n</tool_call>\n</think>\n\nDone </think>.",
        "Done </think>.",
        [NOW],
        "Look.",
        "think",
        is_thinking=True,
    ),
    Transcript("hermes", "  A <think> later is text.", "  A <think> later is text.", reasons_by="think"),
    Transcript("llama3_json", "Just text.", "Just text."),
    Transcript("llama3_json", _json(OSLO, "parameters"), "", [OSLO]),
    Transcript(
        "llama3_json",
        f"<|python_tag|>{_json(OSLO, 'parameters')}; {_json(TOKYO, 'parameters')}",
        "",
        [OSLO, TOKYO],
    ),
    Transcript("llama3_json", f"\n[{_json(NOW)}, {_json(CODE)}]\n", "", [NOW, CODE]),
    Transcript("llama3_json", f"Let me see.<|python_tag|>{_json(NOW)}", "Let me see.", [NOW]),
    Transcript("llama3_json", '{"answer": 42} is it.', '{"answer": 42} is it.'),
    Transcript("llama3_json", '<think>a \n\n</think>{"answer": 1}', '{"answer": 1}', [], "a", "think"),
    Transcript("pythonic", "<think>a\n\n</think>[1] foo", "[1] foo", [], "a", "think"),
    Transcript("mistral", '[THINK]a\n[/THINK]{"answer": 1}', '{"answer": 1}', [], "a", "mistral"),
    Transcript("pythonic", "Just text [1].", "Just text [1]."),
    Transcript("pythonic", '[weather(city="Oslo", days=3, hourly=True)]', "", [OSLO]),
    Transcript(
        "pythonic",
        "<|python_start|>[weather(city='東京 🗼', near=['横浜', \"a ] b\"]), time()]<|python_end|>",
        "",
        [TOKYO, NOW],
    ),
    Transcript(
        "pythonic", "[write-file(path='a.py', text='if x < 3:\\n    print(\"{[<b>]}\")\\n')]", "", [CODE]
    ),
    Transcript("pythonic", "[1] says so (see above).", "[1] says so (see above)."),
    Transcript("mistral", f"[TOOL_CALLS][{_json(OSLO)}, {_json(TOKYO)}]", "", [OSLO, TOKYO]),
    Transcript("mistral", f'[TOOL_CALLS] [{_json(NOW)[:-1]}, "id": "a1B2c3D4e"}}]', "", [NOW], ids=("a1B2c3D4e",)),
    Transcript("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3, "hourly": true}', "", [OSLO]),
    Transcript(
        "mistral",
        '[THINK]Two calls.[/THINK]Look: [TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]time{}',
        "Look:",
        [NOW, NOW],
        "Two calls.",
        "mistral",
        ids=("abcdefghi", None),
    ),
    Transcript("mistral", "No [TOOL", "No [TOOL"),
    Transcript(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n"
        "</function>\n</tool_call>",
        "I look.",
        [OSLO, NOW],
    ),
    Transcript(
        "qwen3_coder",
        "Right.\n</think>\n\n<tool_call>\n<function=write-file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
        'if x < 3:\n    print("{[<b>]}")\n\n</parameter>\n</function>\n</tool_call>',
        "",
        [CODE],
        "Right.",
        "think",
        is_thinking=True,
    ),
    # As the parser that Qwen publishes: a value ends at the next parameter, at the function's end, or at the output's.
    Transcript(
        "qwen3_coder",
        OPEN_VALUE + "\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", {"city": "Oslo", "days": 3})],
    ),
    Transcript("qwen3_coder", OPEN_VALUE + "\n</parameter>\n</tool_call>On.", "On.", [("weather", {"city": "Oslo"})]),
    Transcript("qwen3_coder", OPEN_VALUE + "\n", "", [("weather", {"city": "Oslo"})]),
    Transcript("qwen3_coder", OPEN_VALUE + "\n</function>\n</tool_call>", "", [("weather", {"city": "Oslo"})]),
    Transcript(
        "qwen3_coder",
        '<tool_call>\n<function="weather">\n<parameter="city">\nOslo\n</parameter>\n</function>\n</tool_call>',
        "",
        [("weather", {"city": "Oslo"})],
    ),
    # A closing tag within a value.
    Transcript(
        "qwen3_coder",
        OPEN_VALUE + " </tool_call> or\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", {"city": "Oslo </tool_call> or"})],
    ),
    Transcript(
        "qwen3_coder",
        OPEN_VALUE + "\n</tool_call>\n" + OPEN_VALUE + "\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", {"city": "Oslo"}), ("weather", {"city": "Oslo"})],
    ),
    Transcript(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value></tool_call></arg_value>\n</tool_call>On.",
        "On.",
        [("weather", {"city": "</tool_call>"})],
    ),
    Transcript(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city"></invoke></parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [("weather", {"city": "</invoke>"})],
    ),
    # The singular, and calls without a section.
    Transcript(
        "kimi_k2",
        '<|tool_call_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"{\\"city\\": 1}"'
        "<|tool_call_end|><|tool_call_section_end|>",
        "",
        [("weather", {"city": 1})],
    ),
    Transcript(
        "kimi_k2",
        "So:<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "So:",
        [("weather", {})],
    ),
    Transcript("qwen3_coder", "<function=time>\n</function>\n", "", [NOW]),
    Transcript("qwen3_coder", "See:\n<function=time>\n</function>\n</tool_call>\nOn.", "See:\nOn.", [NOW]),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=time>\n</function>\n<function=time>\n</function>\n</tool_call>",
        "",
        [NOW, NOW],
    ),
    Transcript(
        "glm45",
        "\n<think>Both.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>東京 🗼</arg_value>"
        '\n<arg_key>near</arg_key>\n<arg_value>["横浜", "a ] b"]</arg_value>\n</tool_call>\n'
        "<tool_call>time\n</tool_call>",
        "I look.",
        [TOKYO, NOW],
        "Both.",
        "think",
    ),
    Transcript(
        "glm45",
        "<think></think>\n<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value><arg_key>hourly</arg_key><arg_value>true</arg_value></tool_call>",
        "",
        [OSLO],
        "",
        "think",
    ),
    Transcript(
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo", "days": 3, "hourly": true}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [OSLO, NOW],
    ),
    Transcript(
        "deepseek_v3",
        "Think first.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo", "days": 3, "hourly": true}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "",
        [NOW, OSLO],
        "Think first.",
        "deepseek_r1",
        is_thinking=True,
    ),
    Transcript(
        "deepseek_v32",
        "Now.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n"
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="hourly" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "Now.",
        [OSLO],
    ),
    Transcript(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="time">\n<｜DSML｜parameter name="zone" string="true">007'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="at" string="false">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="on" string="true">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        [("time", {"zone": "007", "at": 7, "on": "12"})],
    ),
    Transcript(
        "kimi_k2",
        "<think>A city.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "東京 🗼", "near": ["横浜", "a ] b"]}<|tool_call_end|><|tool_call_begin|>'
        "functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        [TOKYO, NOW],
        "A city.",
        "think",
        ids=("functions.weather:0", "functions.time:1"),
    ),
    Transcript(
        "kimi_k2",
        "<think>A city<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "",
        [NOW],
        "A city",
        "think",
        ids=("functions.time:0",),
    ),
    Transcript(
        "kimi_k2",
        "<think>Never closed <|tool_calls_section_begin|><|tool_call_begin|>functions.time:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [NOW],
        "Never closed",
        "think",
        ids=("functions.time:0",),
    ),
    Transcript(
        "minimax_m2",
        "Two.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Oslo"
        '</parameter>\n<parameter name="days">3</parameter>\n<parameter name="hourly">true</parameter>\n</invoke>\n'
        '<invoke name="time">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        [OSLO, NOW],
        "Two.",
        "think",
        is_thinking=True,
    ),
    Transcript(
        "minimax_m2",
        '<think>Now.</think>\n\n<minimax:tool_call>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>\n',
        "",
        [NOW],
        "Now.",
        "think",
    ),
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>The user asks 1 < 2.<|end|><|start|>assistant<|channel|>commentary to="
        'functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3, "hourly": true}<|call|>',
        "",
        [OSLO],
        "The user asks 1 < 2.",
    ),
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}",
        "I look.",
        [NOW],
        "Hm.",
    ),
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
        "It is 4.",
        [],
        "Easy.",
    ),
    Transcript("openai", "<|channel|>final<|message|>Hi<|end|><|start|>assist", "Hi"),
    Transcript("openai", "No channels at all.", "No channels at all."),
    Transcript(
        "functiongemma",
        "I look.<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3,hourly:true}<end_function_call>"
        "<start_function_call>call:time{}<end_function_call>",
        "I look.",
        [OSLO, NOW],
    ),
    Transcript(
        "gemma4",
        "<|channel>thought\nA city.\n<channel|><|tool_call>call:weather{city:<|\"|>東京 🗼<|\"|>,"
        'near:[<|"|>横浜<|"|>,<|"|>a ] b<|"|>]}<tool_call|><|tool_call>call:write-file{path:<|"|>a.py<|"|>,text:<|"|>'
        'if x < 3:\n    print("{[<b>]}")\n<|"|>}<tool_call|>',
        "",
        [TOKYO, CODE],
        "A city.",
        "gemma4",
    ),
    Transcript("gemma4", "<|channel>thought\n<channel|>Hello.", "Hello.", reasons_by="gemma4"),
    Transcript("granite", f"See.\n<|tool_call|> [{_json(OSLO)}, {_json(NOW)}]\nDone.", "See.\nDone.", [OSLO, NOW]),
    Transcript("gemma4", "Hi.<|channel>thought\n<channel|><channel|>", "Hi.", reasons_by="gemma4"),
    Transcript("granite", "<think>Hm.</think><response>Hi.</response>", "Hi.", [], "Hm.", "think"),
    # In the answer, the markers are text.
    Transcript(
        "granite",
        "Here:\n```xml\n<response>\n  <ok/>\n</response>\n```",
        "Here:\n```xml\n<response>\n  <ok/>\n</response>\n```",
    ),
    Transcript("granite", f"<tool_call>[{_json(TOKYO)}]</tool_call>", "", [TOKYO]),
    Transcript("granite", f"<|tool_call|>[{_json(OSLO)}, {{", "{", [OSLO]),
    Transcript("phi4_mini_json", f"functools[{_json(OSLO)}]", "", [OSLO]),
    Transcript("phi4_mini_json", f"<|tool_call|>[{_json(NOW)}]<|/tool_call|>", "", [NOW]),
    Transcript("phi4_mini_json", "from functools import cache", "from functools import cache"),
    Transcript("hunyuan_a13b", f"<think>A city.</think>\n<tool_calls>[{_json(TOKYO)}\n]\n</tool_calls>", "", [TOKYO],
               "A city.", "think"),
    Transcript("apertus", 'So:<|tools_prefix|>[{"time": {}}]<|tools_suffix|>', "So:", [NOW]),
    Transcript("granite-20b-fc", f"<function_call> {_json(OSLO)}\n<function_call> {_json(NOW)}", "", [OSLO, NOW]),
    Transcript("gigachat3", f"See.\nfunction call<|role_sep|>\n{_json(OSLO)}", "See.", [OSLO]),
    Transcript("gigachat3", f"<|function_call|>{_json(NOW)}", "", [NOW]),
    Transcript("internlm", f"<|action_start|><|plugin|>\n{_json(OSLO, 'parameters')}<|action_end|>", "", [OSLO]),
    Transcript(
        "solar_open",
        "<|think|>A city.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>time"
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        "",
        [NOW],
        "A city.",
        "solar_open",
        ids=("a1b2c3d4e5",),
    ),
    Transcript(
        "solar_open",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Hi there.<|end|>",
        "Hi there.",
        [],
        "Hm.",
        "solar_open",
    ),
    Transcript(
        "hunyuan_a13b",
        f"Hm.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{_json(NOW)}]</tool_calls>",
        "",
        [NOW],
        "Hm.",
        "apriel",
        is_thinking=True,
    ),
    Transcript("nemotron_json", f"See: <TOOLCALL>[{_json(OSLO)}]</TOOLCALL>", "See:", [OSLO]),
    Transcript(
        "cohere_command",
        "<|START_THINKING|>Look up.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo", "days": 3, "hourly": true}}\n'
        "]<|END_ACTION|>",
        "",
        [OSLO],
        "Look up.",
        "cohere_command",
    ),
    Transcript(
        "cohere_command",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi there.<|END_RESPONSE|>",
        "Hi there.",
        [],
        "Hm.",
        "cohere_command",
    ),
    Transcript("ernie45", "Hm.\n</think>\n\n<response>\nHi.\n</response>\n", "Hi.", [], "Hm.", "think",
               is_thinking=True),
    Transcript("ernie45", f"Hm.\n</think>\n\n{_hermes(OSLO, NOW)}\n", "", [OSLO, NOW], "Hm.", "think",
               is_thinking=True),
    Transcript("ernie45", f"Look.\n{_hermes(OSLO, NOW)}\n", "Look.", [OSLO, NOW]),
    Transcript("lfm2", '<|tool_call_start|>[weather(city="Oslo", days=3, hourly=True)]<|tool_call_end|>I look.',
               "I look.", [OSLO]),
    Transcript(
        "lfm2",
        "<think>Not <|tool_call_start|>[time()]<|tool_call_end|> now.</think><|tool_call_start|>[time()]"
        "<|tool_call_end|>",
        "",
        [NOW],
        "Not <|tool_call_start|>[time()]<|tool_call_end|> now.",
        "think",
    ),
    # Quotes that are not escaped, and a set.
    Transcript(
        "lfm2",
        "<|tool_call_start|>[write-file(path='a 'b' c', text='x'), weather(near={'a', 'b'}, days=07)]<|tool_call_end|>",
        "",
        [("write-file", {"path": "a 'b' c", "text": "x"}), ("weather", {"near": ["a", "b"], "days": 7})],
    ),
    Transcript(
        "olmo3",
        "On it.\n<function_calls>\nweather(city='Oslo', days=3, hourly=true)\ntime()\n</function_calls>",
        "On it.",
        [OSLO, NOW],
    ),
    Transcript("seed_oss", "<seed:tool_call>\n<function=write-file>\n<parameter=text>\na\n</parameter>\n</function>\n"
               "</seed:tool_call>", "", [("write-file", {"text": "\na\n"})]),
    Transcript(
        "seed_oss",
        "<seed:think>A file.</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=hourly>true</parameter>\n</function>\n</seed:tool_call>",
        "",
        [OSLO],
        "A file.",
        "seed_oss",
    ),
    Transcript(
        "deepseek_v4",
        "Now.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n"
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="hourly" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "Now.",
        [OSLO],  # the schema excludes texts, so that days is a number
    ),
    # Without the tags around the calls, and all arguments in one.
    Transcript(
        "deepseek_v4",
        '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="arguments" string="false">'
        '{"city": "Oslo", "days": 3, "hourly": true}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>\nDone.",
        "Done.",
        [OSLO],
    ),
    Transcript(
        "dots",
        'ok<dots_function_call><invoke name="weather"><parameter name="city">Oslo</parameter><parameter name="days">3'
        '</parameter><parameter name="hourly">true</parameter></invoke></dots_function_call>',
        "ok",
        [OSLO],
    ),
]  # fmt: skip

# Text that is not a tool call is returned unchanged.
MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": </tool_call> after'),
    ("hermes", "a <tool_call>{</tool_call> b"),
    ("hermes", "<tool_call>\nno JSON\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": [], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "time", "arguments": "no"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "time", "arguments": NaN}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1e999}}</tool_call>'),
    ("llama3_json", '[{"name": "weather", "parameters": {"days": -1e999}}, '),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"days": 1e999}'),
    ("hermes", "<tool_call>" + "[" * 20_000),
    ("hermes", "<tool_call>" + '{"a":' * 20_000),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os'),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Os'),
    ("llama3_json", '{"name": "rm", "parameters": {}}'),
    ("llama3_json", "{broken} and on"),
    ("llama3_json", '{"answer": {"unbalanced": 1'),
    ("llama3_json", '[{"name": "time", "parameters": {}}, {"name": "rm", "parameters": {}}]'),
    ("pythonic", "[see (this) or that"),
    ("pythonic", "[time(), " + "weather(near=[[]" * 5_000),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[weather(city=Oslo)] is no call"),
    ("pythonic", "[weather(city=__import__('os').system('true'))]"),
    ("pythonic", "[weather('Oslo')]"),
    ("pythonic", "[rm()]"),
    ("pythonic", "[weather(city='Os"),
    ("pythonic", "[weather(near=" + "[" * 500 + "]" * 500 + ")]"),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Os'),
    ("mistral", "[TOOL_CALLS]weather[ARGS]no JSON"),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]weather"),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\nno function\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=weather>\nstray\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>rm\n</tool_call>"),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os"),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="rm">\n</｜DSML｜invoke>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0{}<|tool_call_end|>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Os'),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\nstray</invoke>\n'),
    ("hy_v3", "<tool_calls>\n<tool_call>rm<tool_sep>\n</tool_call>\n</tool_calls>"),
    ("hy_v3", "<tool_calls><tool_call>weather<tool_sep><arg_key>city</arg_key><arg_value>Os"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="rm"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="time"<|sep|>stray<|close|>call<|sep|><|close|>tools<|sep|>'),
    ("minicpm5", '<function name="rm"></function>'),
    ("minicpm5", '<function name="weather"><param>Oslo</param></function>'),
    ("minicpm5", '<function name="weather"><param name="city">a</param><param name="city">b</param></function>'),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="rm">]<]minimax[>[</invoke>'),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Os'),
    ("openai", "<|channel|>final The answer is: 4."),
    ("functiongemma", "<start_function_call>call:rm{}<end_function_call>"),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Os"),
    ("gemma4", "<|tool_call>weather{}<tool_call|>"),
    ("granite", '<|tool_call|>[{"name": "rm", "arguments": {}}]'),
    ("granite", '<|tool_call|> [{"name": "weather", "arguments": {'),
    ("phi4_mini_json", "functools.cache or functools[0]"),
    ("hunyuan_a13b", '<tool_calls>[{"name": "weather"'),
    ("nemotron_json", "<TOOLCALL>none"),
    ("hermes", '<tool_call>{"weather": {"city": "Oslo"}}</tool_call>'),
    ("apertus", '<|tools_prefix|>[{"rm": {}}]<|tools_suffix|>'),
    ("gigachat3", "a function call<|role_sep|>none"),
    ("granite-20b-fc", '<function_call> {"name": "weather"'),
    ("internlm", '<|action_start|><|plugin|>{"name": "rm"}'),
    (
        "solar_open",
        "<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>rm<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    ),
    ("lfm2", "<|tool_call_start|>[rm()]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[time("),
    ("olmo3", "<function_calls>time() or so</function_calls>"),
    ("seed_oss", "<seed:tool_call>none</seed:tool_call>"),
    ("deepseek_v4", '<｜DSML｜invoke name="rm">\n</｜DSML｜invoke>'),
    ("dots", "<dots_function_call>none</dots_function_call>"),
    ("gemma4", "<|tool_call>call:weather{city:Oslo}<tool_call|>"),
]
