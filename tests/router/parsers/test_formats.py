"""Each format, compared with its chat template, and the detection of a model's format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat, format_of
from router.pipeline.template_renderer import Renderer
from tests.router.parsers.transcripts import OFFER, Named, model_format, summary

# The loop over the tool calls of an assistant message in the chat template of a model with this format.
TEMPLATES = {
    "hermes": """
        {%- for c in calls %}{{ '<tool_call>\\n{"name": "' }}{{ c.name }}{{ '", "arguments": ' }}
        {{- c.arguments | tojson }}{{ '}\\n</tool_call>\\n' }}{% endfor %}""",
    "llama3_json": """
        {%- for c in calls %}{{ '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}
        {%- if not loop.last %}{{ '; ' }}{% endif %}{% endfor %}""",
    "mistral": """{{- '[TOOL_CALLS] [' }}
        {%- for c in calls %}{{ '{"name": "' + c.name + '", "arguments": ' + c.arguments | tojson + '}' }}
        {%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}""",
    "qwen3_coder": """
        {%- for c in calls %}{{ '<tool_call>\\n<function=' + c.name + '>\\n' }}
        {%- for k, v in c.arguments | items %}{{ '<parameter=' + k + '>\\n' }}
        {{- v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}
        {{- '</function>\\n</tool_call>\\n' }}{% endfor %}""",
    "glm45": """
        {%- for c in calls %}{{ '\\n<tool_call>' + c.name }}
        {%- for k, v in c.arguments | items %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
        {{- v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}
        {{- '\\n</tool_call>' }}{% endfor %}""",
    "deepseek_v3": """{{- '<｜tool▁calls▁begin｜>' }}
        {%- for c in calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.name + '\\n```json\\n' }}
        {{- c.arguments | tojson }}{{ '\\n```<｜tool▁call▁end｜>\\n' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}""",
    "deepseek_v32": """{{- '<｜DSML｜function_calls>\\n' }}
        {%- for c in calls %}{{ '<｜DSML｜invoke name="' + c.name + '">\\n' }}
        {%- for k, v in c.arguments | items %}{{ '<｜DSML｜parameter name="' + k + '" string="' }}
        {{- 'true' if v is string else 'false' }}{{ '">' }}{{ v if v is string else v | tojson }}
        {{- '</｜DSML｜parameter>\\n' }}{% endfor %}{{ '</｜DSML｜invoke>\\n' }}{% endfor %}
        {{- '</｜DSML｜function_calls>' }}""",
    "deepseek_v4": """{{- '<｜DSML｜tool_calls>\\n' }}
        {%- for c in calls %}{{ '<｜DSML｜invoke name="' + c.name + '">\\n' }}
        {%- for k, v in c.arguments | items %}{{ '<｜DSML｜parameter name="' + k + '" string="' }}
        {{- 'true' if v is string else 'false' }}{{ '">' }}{{ v if v is string else v | tojson }}
        {{- '</｜DSML｜parameter>\\n' }}{% endfor %}{{ '</｜DSML｜invoke>\\n' }}{% endfor %}
        {{- '</｜DSML｜tool_calls>' }}""",
    "dots": """{{- '<dots_function_call>' }}
        {%- for c in calls %}{{ '<invoke name="' + c.name + '">' }}
        {%- for k, v in c.arguments | items %}{{ '<parameter name="' + k + '">' }}
        {{- v if v is string else v | tojson }}{{ '</parameter>' }}{% endfor %}{{ '</invoke>' }}{% endfor %}
        {{- '</dots_function_call>' }}""",
    "ernie45": """
        {%- for c in calls %}{{ '<tool_call>\\n{"name": "' }}{{ c.name }}{{ '", "arguments": ' }}
        {{- c.arguments | tojson }}{{ '}\\n</tool_call>\\n' }}{% endfor %}""",
    "granite": """{{- '<|tool_call|>[' }}
        {%- for c in calls %}{{ {'arguments': c.arguments, 'name': c.name} | tojson }}
        {%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}""",
    "phi4_mini_json": """{{- '<|tool_call|>[' }}
        {%- for c in calls %}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}
        {%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|/tool_call|>' }}""",
    "hunyuan_a13b": """{{- '<tool_calls>[\\n' }}
        {%- for c in calls %}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}
        {%- if not loop.last %}{{ ',\\n' }}{% endif %}{% endfor %}{{ '\\n]</tool_calls>' }}""",
    "nemotron_json": """{{- '<TOOLCALL>[' }}
        {%- for c in calls %}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}
        {%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</TOOLCALL>' }}""",
    "cohere_command": """{{- '<|START_ACTION|>[\\n' }}
        {%- for c in calls %}{{ '    {"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + c.name }}
        {{- '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}
        {%- if not loop.last %}{{ ',\\n' }}{% endif %}{% endfor %}{{ '\\n]<|END_ACTION|>' }}""",
    "apertus": """{{- '<|tools_prefix|>[' }}
        {%- for c in calls %}{{ {c.name: c.arguments} | tojson }}
        {%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|tools_suffix|>' }}""",
    "granite-20b-fc": """
        {%- for c in calls %}{{ '<function_call> ' }}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}
        {{- '\\n' }}{% endfor %}""",
    "gigachat3": """
        {%- for c in calls %}{{ 'function call<|role_sep|>\\n' }}
        {{- {'name': c.name, 'arguments': c.arguments} | tojson }}{% endfor %}""",
    "internlm": """
        {%- for c in calls %}{{ '<|action_start|><|plugin|>\\n' }}
        {{- {'name': c.name, 'arguments': c.arguments} | tojson }}{{ '<|action_end|>' }}{% endfor %}""",
    "solar_open": """{{- '<|tool_calls|>' }}
        {%- for c in calls %}{{ '<|tool_call:begin|>a1' ~ loop.index0 ~ '<|tool_call:name|>' + c.name }}
        {{- '<|tool_call:args|>' }}{{ c.arguments | tojson }}{{ '<|tool_call:end|>' }}{% endfor %}
        {{- '<|calls|>' }}""",
    "seed_oss": """
        {%- for c in calls %}{{ '<seed:tool_call>\\n<function=' + c.name + '>\\n' }}
        {%- for k, v in c.arguments | items %}{{ '<parameter=' + k + '>' }}
        {{- v if v is string else v | tojson }}{{ '</parameter>\\n' }}{% endfor %}
        {{- '</function>\\n</seed:tool_call>' }}{% endfor %}""",
    "kimi_k2": """{{- '<|tool_calls_section_begin|>' }}
        {%- for c in calls %}{{ '<|tool_call_begin|>functions.' + c.name + ':' ~ loop.index0 }}
        {{- '<|tool_call_argument_begin|>' }}{{ c.arguments | tojson }}{{ '<|tool_call_end|>' }}{% endfor %}
        {{- '<|tool_calls_section_end|>' }}""",
    "kimi_k3": """{{- '<|open|>tools<|sep|>' }}
        {%- for c in calls %}{{ '<|open|>call tool="' + c.name + '" index="' ~ loop.index ~ '"<|sep|>' }}
        {%- for k, v in c.arguments | items %}{{ '<|open|>argument key="' + k + '" type="' }}
        {{- 'string' if v is string else 'object' }}{{ '"<|sep|>' }}{{ v if v is string else v | tojson }}
        {{- '<|close|>argument<|sep|>' }}{% endfor %}{{ '<|close|>call<|sep|>' }}{% endfor %}
        {{- '<|close|>tools<|sep|>' }}""",
    "hy_v3": """{{- '<tool_calls>\\n' }}
        {%- for c in calls %}{{ '<tool_call>' + c.name + '<tool_sep>\\n' }}
        {%- for k, v in c.arguments | items %}{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
        {{- v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>\\n' }}{% endfor %}
        {{- '</tool_calls>' }}""",
    "minicpm5": """
        {%- for c in calls %}{{ '<function name="' + c.name + '">' }}
        {%- for k, v in c.arguments | items %}{{ '<param name="' + k + '"><![CDATA[' }}
        {{- v if v is string else v | tojson }}{{ ']]></param>' }}{% endfor %}{{ '</function>\\n' }}{% endfor %}""",
    "minimax_m3": """{%- set m = ']<]minimax[>[' %}{{- m + '<tool_call>\\n' }}
        {%- for c in calls %}{{ m + '<invoke name="' + c.name + '">' }}
        {%- for k, v in c.arguments | items %}{{ m + '<' + k + '>' }}
        {%- if v is string %}{{ v }}{% elif k == 'near' %}
        {%- for item in v %}{{ m + '<item>' + item + m + '</item>' }}{% endfor %}{% else %}{{ v | tojson }}{% endif %}
        {{- m + '</' + k + '>' }}{% endfor %}{{ m + '</invoke>\\n' }}{% endfor %}{{ m + '</tool_call>' }}""",
    "minimax_m2": """{{- '\\n<minimax:tool_call>\\n' }}
        {%- for c in calls %}{{ '<invoke name="' + c.name + '">\\n' }}
        {%- for k, v in c.arguments | items %}{{ '<parameter name="' + k + '">' }}
        {{- v if v is string else v | tojson }}{{ '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}
        {{- '</minimax:tool_call>' }}""",
    "openai": """
        {%- for c in calls %}{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
        {{- c.arguments | tojson }}{{ '<|call|>' }}{% endfor %}""",
    "functiongemma": """
        {%- macro value(v) %}{% if v is string %}<escape>{{ v }}<escape>{% elif v is mapping %}{
        {%- for k, w in v | items %}{{ '' if loop.first else ',' }}<escape>{{ k }}<escape>:{{ value(w) }}{% endfor %}}
        {%- elif v is sequence %}[{% for w in v %}{{ '' if loop.first else ',' }}{{ value(w) }}{% endfor %}]
        {%- else %}{{ v | tojson }}{% endif %}{% endmacro %}
        {%- for c in calls %}{{ '<start_function_call>call:' + c.name + '{' }}
        {%- for k, v in c.arguments | items %}{{ '' if loop.first else ',' }}{{ k }}:{{ value(v) }}{% endfor %}
        {{- '}<end_function_call>' }}{% endfor %}""",
    "gemma4": """
        {%- macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{
        {%- for k, w in v | items %}{{ '' if loop.first else ',' }}{{ k }}:{{ value(w) }}{% endfor %}}
        {%- elif v is sequence %}[{% for w in v %}{{ '' if loop.first else ',' }}{{ value(w) }}{% endfor %}]
        {%- else %}{{ v | tojson }}{% endif %}{% endmacro %}
        {%- for c in calls %}{{ '<|tool_call>call:' + c.name + '{' }}
        {%- for k, v in c.arguments | items %}{{ '' if loop.first else ',' }}{{ k }}:{{ value(v) }}{% endfor %}
        {{- '}<tool_call|>' }}{% endfor %}""",
}
# `<` is excluded, because a value that contains one of the format's special tokens would be ambiguous.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
WEATHER = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXTS,
        "days": st.integers(-9, 10**6),
        "hourly": st.booleans(),
        "near": st.lists(TEXTS, max_size=3),
        "other": st.dictionaries(
            st.sampled_from(("a", "b")), st.booleans() | st.none() | st.integers(0, 9), max_size=2
        ),
    },
)
FILE = st.fixed_dictionaries({"path": TEXTS, "text": TEXTS})
NAMED: list[tuple[str, st.SearchStrategy[dict[str, Any]]]] = [
    ("weather", WEATHER),
    ("write-file", FILE),
    ("time", st.just({})),
]
CALLS: st.SearchStrategy[list[Named]] = st.lists(
    st.one_of(*(st.tuples(st.just(name), arguments) for name, arguments in NAMED)), min_size=1, max_size=3
)
RENDERERS = {name: Renderer(source) for name, source in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60)
@given(calls=CALLS)
def test_calls_that_a_template_writes_are_read_back(name: str, calls: list[Named]) -> None:
    variables = [{"name": tool, "arguments": arguments} for tool, arguments in calls]
    text = RENDERERS[name].render({"calls": variables})["text"]
    parser = model_format(name).parser(OFFER)
    assert summary(parser.feed(text) + parser.finish()) == ("", "", calls)


PYTHONIC = {
    "pythonic": ("[", ", ", "]"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "\n", "</function_calls>"),
}


@pytest.mark.parametrize("name", PYTHONIC)
@settings(max_examples=60)
@given(calls=CALLS)
def test_python_literals_are_parsed(name: str, calls: list[Named]) -> None:
    begin, separator, end = PYTHONIC[name]
    written = separator.join(
        f"{tool}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for tool, arguments in calls
    )
    parser = model_format(name).parser(OFFER)
    assert summary(parser.feed(begin + written + end) + parser.finish()) == ("", "", calls)


HERMES = "{% if tools %}within <tool_call></tool_call> tags{% endif %}"
R1 = "{{ '<｜Assistant｜>' }}{% if x %}{{ '<｜tool▁calls▁begin｜>' }}{{ content.split('</think>')[-1] }}{% endif %}"
FOUND = [
    (None, "llama", "none", "none"),
    ("{{ messages }}", "llama", "none", "none"),
    (HERMES, "qwen2", "hermes", "none"),
    (HERMES + "<think></think>", "qwen3", "hermes", "think"),
    (HERMES + "<function=f><parameter=p></think>", "qwen3_5", "qwen3_coder", "think"),
    (HERMES + "<arg_key></think>", "glm4_moe", "glm45", "think"),
    ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", "mistral", "none"),
    ("[THINK][TOOL_CALLS]", "mistral", "mistral", "mistral"),
    ('{% if tools %}{"name": function name, "parameters": dictionary}', "llama", "llama3_json", "none"),
    ("{% if tools %}[func_name1(params_name1=params_value1...)]", "llama4", "pythonic", "none"),
    (R1, "deepseek_v3", "deepseek_v3", "deepseek_r1"),
    (R1 + "{% if thinking %}", "deepseek_v3", "deepseek_v3", "think"),
    ("<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2", "think"),
    ("<minimax:tool_call></think>", "minimax", "minimax_m2", "think"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss", "openai", "openai"),
    (None, "gpt_oss", "openai", "openai"),
    ("<start_function_call>", "gemma3_text", "functiongemma", "none"),
    ("<|tool_call><|channel><channel|>", "gemma4", "gemma4", "gemma4"),
    ("<|tool_call|>[{{ tool_calls }}]", "granite", "granite", "none"),
    ("<|tool|>{{ tools }}<|/tool|>", "phi3", "phi4_mini_json", "none"),
    ("<tool_calls>", "hunyuan_v1_moe", "hunyuan_a13b", "none"),
    ("<TOOLCALL>[</think>", "nemotron_h", "nemotron_json", "think"),
    ("<|START_ACTION|><|START_THINKING|><|END_THINKING|>", "cohere2", "cohere_command", "cohere_command"),
    ("<|tool_list_start|>[{{ tools }}]", "lfm2", "lfm2", "none"),
    ("<function_calls>{{ calls }}</function_calls>", "olmo3", "olmo3", "none"),
    ("<seed:tool_call><function=f><parameter=p></seed:think>", "seed_oss", "seed_oss", "seed_oss"),
    ("<tool_call>\\n<response></think>", "ernie4_5_moe", "ernie45", "think"),
    ("<｜DSML｜tool_calls></think>", "deepseek_v4", "deepseek_v4", "think"),
    ("<｜DSML｜function_calls></think>", "deepseek_v32", "deepseek_v32", "think"),
    ("<dots_function_call>", "dots1", "dots", "none"),
    ("List of tools: {{ tools }}", "lfm2", "lfm2", "none"),
    ("<|begin|>assistant<|think|>{{ x }}<|tool_calls|>", "solar_open", "solar_open", "solar_open"),
    ("<|tools_prefix|>", "apertus", "apertus", "none"),
    ("function call<|role_sep|>", "deepseek_v3", "gigachat3", "none"),
    ("<function_call> {{ call }}", "gpt_bigcode", "granite-20b-fc", "none"),
    ("<|action_start|><|plugin|>", "internlm2", "internlm", "none"),
    ("]<]minimax[>[<tool_call><response></mm:think>", "minimax_m3_vl", "minimax_m3", "minimax_m3"),
    ("<|open|>think<|sep|><|close|>", "kimi_k3", "kimi_k3", "kimi_k3"),
    ("<tool_calls><tool_call>{{ n }}<tool_sep><arg_key></think>", "hy_v3", "hy_v3", "think"),
    ('<function name="{{ n }}"><param name="{{ k }}"></think>', "minicpm", "minicpm5", "think"),
    ("{% if tools %}use [func_name1(param1=value1)]", "llama4", "pythonic", "none"),
]


@pytest.mark.parametrize(("template", "architecture", "tools", "reasoning"), FOUND)
def test_the_format_is_derived_from_the_model(
    folder: ModelFolder, template: str | None, architecture: str, tools: str, reasoning: str
) -> None:
    found = format_of(replace(folder, chat_template=template, architecture=architecture))
    assert found == ModelFormat(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning), tools == "openai")


def test_known_formats_are_accepted_and_others_rejected(folder: ModelFolder) -> None:
    assert format_of(replace(folder, chat_template=HERMES), "none", "think").tools is None
    assert format_of(folder, "mistral").tools is TOOL_FORMATS["mistral"]
    for names in (("x",), ("auto", "x")):
        with pytest.raises(ConfigError):
            format_of(folder, *names)


def test_a_prompt_tells_whether_the_model_thinks() -> None:
    think = REASONING_FORMATS["think"]
    assert think is not None
    assert think.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not think.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.is_open_after("<|im_start|>assistant\n")


def test_a_continued_message_tells_whether_the_model_thinks() -> None:
    for name in ("think", "deepseek_r1"):
        tags = REASONING_FORMATS[name]
        assert tags is not None
        assert tags.is_open_in("<think>\nI should")
        assert not tags.is_open_in("<think>\nI should say hi.\n</think>\n\nHi")
        assert not tags.is_open_in("The answer is")


def test_call_ids_are_deterministic_and_valid_in_templates() -> None:
    for name, tools in TOOL_FORMATS.items():
        ids = [ModelFormat(tools).call_id(request, 0, index, "time") for request in "ab" for index in range(3)]
        assert ids == [ModelFormat(tools).call_id(request, 0, index, "time") for request in "ab" for index in range(3)]
        assert len(set(ids)) == (3 if name == "kimi_k2" else 6)
    assert len(model_format("mistral").call_id("r", 0, 0, "time")) == 9
    assert model_format("kimi_k2").call_id("r", 0, 1, "time") == "functions.time:1"


def test_every_format_has_a_template_here() -> None:
    assert TEMPLATES.keys() | PYTHONIC.keys() == TOOL_FORMATS.keys()
