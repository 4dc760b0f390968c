"""Calls as JSON after a marker, in an array (Granite 3, Phi-4 Mini, Command, Hunyuan, Jamba, Nemotron, Apertus) or as a
single object (Granite 20B, GigaChat 3, InternLM 2).
"""

from __future__ import annotations

from collections.abc import Mapping

from router.parsers.json_calls import ReadCall, read_call, read_calls, split_calls
from router.parsers.machine import Machine, Script, Steps

GRANITE = {"<|tool_call|>": "", "<tool_call>": "</tool_call>"}
PHI4_MINI = {"functools": "", "<|tool_call|>": "<|/tool_call|>"}
COMMAND = {"<|START_ACTION|>": "<|END_ACTION|>"}
HUNYUAN = {"<tool_calls>": "</tool_calls>"}
NEMOTRON = {"<TOOLCALL>": "</TOOLCALL>"}
APERTUS = {"<|tools_prefix|>": "<|tools_suffix|>"}
GRANITE_20B = {"<function_call>": ""}
GIGACHAT = {"<|function_call|>": "", "function call<|role_sep|>": ""}
INTERNLM = {"<|action_start|><|plugin|>": "<|action_end|>"}


def after(marks: Mapping[str, str], read: ReadCall = read_call) -> Script:
    """Return the parser for JSON after one of `marks`, each with the text that may follow the JSON; `read` returns the
    call in a JSON object.
    """

    def script(machine: Machine) -> Steps[None]:
        while mark := (yield from machine.text_until(*marks)):
            raw = mark + (yield from machine.take_space())
            if (yield from machine.peek()) not in ("[", "{"):
                machine.settle(None, raw)
                continue
            body, is_complete = yield from machine.take_balanced(*marks)
            if not is_complete:
                # If the output was cut off, the complete calls still count.
                calls, rest = split_calls(body, read)
                if machine.settle(calls, raw + body):
                    machine.settle(None, rest)
                continue
            if machine.settle(read_calls(body, read), raw + body):
                yield from machine.after_call()
                if marks[mark] and (yield from machine.accept(marks[mark])):
                    yield from machine.after_call()

    return script
