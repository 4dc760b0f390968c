"""Conversations, used by all chat APIs, and the parser events from which the APIs build their responses.

1. An API reads its body into a Conversation: the native request and its tools.
2. `prepare` renders the prompt, detects whether it opens the reasoning, and adds the grammar that tools need.
3. A SequenceReader turns a sequence's text into events. The events depend only on the text, so a stream can be resumed
   by reading the text again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from midstream.errors import InvalidArgumentError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.parsers import llama
from router.parsers.events import CallArguments, CallBegin, Event, TextDelta
from router.parsers.formats import ModelFormat, ToolFormat, format_of
from router.parsers.guides import (
    CallGrammar,
    auto_guide,
    calls_or_json,
    channels_guide,
    lenient,
    required_calls,
    resource,
)
from router.parsers.guides import after_thinking as json_after_thinking
from router.parsers.machine import Machine, Offer, Schema, Script, Steps, arguments_text, parse_json
from router.parsers.reasoning import after_thinking, plain
from router.pipeline.output_checks import Divide, Part, is_lenient
from router.pipeline.prompt import PromptBuilder, PromptOptions, text_of
from router.pipeline.request_checks import fit_to_context

logger = logging.getLogger(__name__)

# Retention priority of prefixes that a client wants cached; the default is 35.
_KEPT_PRIORITY = 80
# Number of tokens at the end of a prompt in which to look for a marker that opens the reasoning.
_NUM_TAIL = 16
# Number of tokens of a prediction that are verified in one step.
_NUM_DRAFTS = 8
_JSON_GUIDES = (pb.GUIDE_TYPE_JSON, pb.GUIDE_TYPE_JSON_SCHEMA)
_ANY_JSON: Schema = {"anyOf": [{"type": "object"}, {"type": "array"}]}
_SWITCHES = ("enable_thinking", "thinking")
# Maps each reasoning effort to one that templates support; some APIs have more efforts than templates.
_EFFORTS = {
    "none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
EFFORTS = tuple(_EFFORTS)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The served model's text format.

    Attributes:
        format: How the model writes calls and reasoning.
        template: The model's chat templates; empty if it has none.
        tokens: Markers of the format that are a single token, with the token's id; grammars must refer to them by id.
        has_special_marks: Whether some markers are special tokens, so that the text must keep special tokens.
    """

    format: ModelFormat = field(default_factory=ModelFormat)
    template: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    has_special_marks: bool = False

    @staticmethod
    def of(
        folder: ModelFolder, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> ChatModel:
        """Load the text format of the model in `folder`, with parsers by name or `auto`.

        Raises:
            ConfigError: A parser's name is unknown.
        """
        found = format_of(folder, tool_parser, reasoning_parser)
        special = {tokenizer.token(token) for token in tokenizer.special_ids}
        ids = {mark: tokenizer.added_tokens[mark] for mark in found.marks if mark in tokenizer.added_tokens}
        # The grammar library treats tokens in angle brackets as special, regardless of the tokenizer.
        tokens = {mark: number for mark, number in ids.items() if mark in special or mark.startswith("<")}
        model = ChatModel(found, folder.templates, tokens, any(mark in special for mark in found.marks))
        if model.template and not model.has_tools:
            logger.info("the chat template does not show tools, so the model calls only tools that a request requires")
        return model

    @property
    def has_developer(self) -> bool:
        """Whether the template has the role `developer`."""
        return "developer" in self.template

    @property
    def has_tools(self) -> bool:
        """Whether the template shows the model its tools."""
        return "tools" in self.template

    @property
    def call_grammar(self) -> CallGrammar | None:
        """How the model writes calls that follow a schema; None if its format has no grammar."""
        known = self.format.tools
        return known.grammar(self.template) if known is not None and known.grammar is not None else None

    @property
    def constrains_calls(self) -> bool:
        """Whether a grammar can constrain the calls that the model chooses to make."""
        return self.format.has_channels or self.call_grammar is not None

    def hides(self, tools: Tools) -> bool:
        """Return whether `tools` have no effect, because the model does not see them and need not call one."""
        return bool(tools.schemas) and tools.choice == "auto" and not self.has_tools

    def ignores_strict(self, tools: Tools) -> bool:
        """Return whether `strict` has no effect on tools that the model sees, as no grammar constrains its calls."""
        is_free = tools.choice == "auto" and not self.hides(tools)
        return bool(tools.strict) and is_free and not self.constrains_calls

    def thinking_variables(self, effort: str) -> dict[str, object]:
        """Return the template variables for one of EFFORTS; empty if the template has no setting for reasoning."""
        values: dict[str, object] = {}
        if "reasoning_effort" in self.template:
            values["reasoning_effort"] = _EFFORTS[effort]
        for name in _SWITCHES:
            if re.search(rf"\b{name} is\b|\bnot {name}\b", self.template):
                values[name] = effort not in ("none", "minimal")
        return values


@dataclass(frozen=True, slots=True)
class Tools:
    """A request's tools.

    Attributes:
        schemas: JSON schema of each tool's parameters, by name; empty if none may be called.
        definitions: Definition of each tool in OpenAI's format, for the chat template, by name; empty to omit the tools
            from the prompt.
        choice: Whether the model decides, must call any tool, or must call `named`.
        strict: Tools whose arguments must match their schemas, if there is a grammar for the model's format.
        is_parallel: Whether there may be several calls.
    """

    schemas: Mapping[str, Schema] = field(default_factory=dict)
    definitions: Mapping[str, object] = field(default_factory=dict)
    choice: Literal["auto", "required", "named"] = "auto"
    named: str = ""
    strict: frozenset[str] = frozenset()
    is_parallel: bool = True

    def require(self, name: str, field_name: str) -> Tools:
        """Return the tools, requiring a call of `name`. Raises InvalidArgumentError if it is not among them."""
        self._check_known({name}, field_name)
        return replace(self, choice="named", named=name)

    def allow(self, names: Set[str], mode: Literal["auto", "required"], field_name: str) -> Tools:
        """Return the tools in `names`. Raises InvalidArgumentError if one of these is not among the tools, or if a call
        is required but `names` is empty.
        """
        self._check_known(names, field_name)
        if mode == "required" and not names:
            raise InvalidArgumentError("must not be empty if a call is required", field=field_name)
        return replace(
            self,
            schemas={name: schema for name, schema in self.schemas.items() if name in names},
            definitions={name: definition for name, definition in self.definitions.items() if name in names},
            strict=self.strict & names,
            choice=mode,
        )

    def _check_known(self, names: Set[str], field_name: str) -> None:
        for name in sorted(names - self.schemas.keys()):
            raise InvalidArgumentError(f"{name[:64]!r} is not among the tools", field=field_name)


@dataclass(slots=True)
class Conversation:
    """One request of a chat API.

    Raises:
        InvalidArgumentError: The model can call tools, but not in combination with the requested output format.

    Attributes:
        request: The native request; its input is `chat` until `prepare`.
        prediction: Text that the answer is expected to repeat.
        num_prompt_tokens: Length of the prompt; 0 before `prepare`, and also afterwards if `prepare` did not render the
            prompt.
        is_thinking: Whether the prompt has opened the reasoning.
        options: How the conversation is converted to tokens.
    """

    request: pb.GenerateRequest
    tools: Tools
    model: ChatModel
    prediction: str = ""
    num_prompt_tokens: int = 0
    is_thinking: bool = False
    options: PromptOptions = field(default_factory=PromptOptions)
    _is_guided: bool = False
    _asks_for_json: bool = False
    # The schema of the answer, if it is enforced only as far as possible.
    _lenient_schema: str = ""
    # Tools whose schemas do not compile, so that they do not restrict their calls.
    _free: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._is_guided = self.request.HasField("guided_decoding")
        self._asks_for_json = self._is_guided and self.request.guided_decoding.guide_type in _JSON_GUIDES
        guide = self.request.guided_decoding
        if guide.guide_type == pb.GUIDE_TYPE_JSON_SCHEMA and is_lenient(guide.guide):
            self._lenient_schema = guide.guide
        if self._may_call_instead:
            self._check_joinable()
        if self.tools.definitions:
            self.request.chat.tools_json = json.dumps(list(self.tools.definitions.values()))
        if self.reads_text and self.model.has_special_marks:
            self.request.output.skip_special_tokens = False

    @property
    def reads_text(self) -> bool:
        """Whether the output text is parsed; otherwise all of it is the answer."""
        known = self.model.format
        if known.reasons:
            return True
        return bool(self.tools.schemas) and (self.tools.choice != "auto" or known.tools is not None)

    @property
    def _may_call_instead(self) -> bool:
        """Whether the model may call tools instead of answering in the requested format."""
        is_free = bool(self.tools.schemas) and self.tools.choice == "auto"
        return self._is_guided and is_free and self.model.has_tools

    def _check_joinable(self) -> None:
        remedy = "leave one of them out, or set tool_choice to none"
        if self.request.guided_decoding.guide_type not in _JSON_GUIDES:
            reason = "cannot be combined with a regular expression or grammar for the answer"
            raise InvalidArgumentError(f"{reason}; {remedy}", field="tools")
        if not self.model.constrains_calls:
            reason = "cannot be combined with a JSON format of the answer, since this model's calls have no grammar"
            raise InvalidArgumentError(f"{reason}; {remedy}", field="tools")

    async def prepare(self, prompts: PromptBuilder, folder: ModelFolder, *, renders: bool = False) -> None:
        """Set the fields that depend on the prompt. With `renders`, the prompt is always rendered, and its tokens are
        counted.

        Raises:
            MidstreamError: The conversation cannot be rendered, or is too long.
        """
        tags = self.model.format.reasoning
        if tags is not None or renders or self.options != PromptOptions():
            ids = await prompts.token_ids(self.request, self.options)
            asked = self.request.max_tokens if self.request.HasField("max_tokens") else None
            fit_to_context(len(ids), asked, folder, "chat")
            self.note_prompt(ids, prompts.tokenizer)
            self.request.token_ids.values[:] = ids
        if self.prediction:
            text = pb.GenerateRequest(prompt=self.prediction)
            ids = await prompts.token_ids(text, PromptOptions(adds_special_tokens=False))
            drafts = self.request.speculative
            drafts.method, drafts.num_draft_tokens = pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, _NUM_DRAFTS
            drafts.prediction_token_ids.extend(ids[: folder.max_sequence_length])
            self.request.output.return_perf_metrics = True
        self.add_guide()

    def note_prompt(self, ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Set the fields that depend on the prompt's tokens: their count, and whether the prompt ends inside
        reasoning.
        """
        tags = self.model.format.reasoning
        if tags is None:
            self.is_thinking = False
        elif self.options.continues_last:
            self.is_thinking = tags.is_open_in(text_of(self.request.chat.messages[-1]))
        else:
            tail = tokenizer.decode(list(ids[-_NUM_TAIL:]), skip_special_tokens=False)
            self.is_thinking = tags.is_open_after(tail)
        self.num_prompt_tokens = len(ids)

    def add_guide(self) -> None:
        """Set the grammar for the tools, and extend any grammar to allow reasoning first."""
        guide = self._guide()
        if guide is not None:
            self.request.guided_decoding.CopyFrom(guide)

    def _guide(self) -> pb.GuidedDecodingConfig | None:
        """Return the grammar for the tools, or for reasoning followed by the requested format; None for no change."""
        tools = self.tools
        if self._has_channels_guide:
            return self._channels_guide()
        if self._is_guided:
            return self._joined_guide() if self._may_call_instead else self._own_guide()
        if not tools.schemas:
            return None
        if tools.choice == "named":
            return self._json_guide(self._parameters(tools.named))
        if tools.choice == "required" and tools.strict and tools.strict != tools.schemas.keys():
            # Each tool has a schema of its own, so that only those that are not strict are lenient.
            text = required_calls(
                {name: self._parameters(name) for name in tools.schemas},
                self.model.tokens,
                max_calls=self._max_calls,
                closing=tags.closing if self.is_thinking and (tags := self.model.format.reasoning) else "",
            )
            return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=text)
        if tools.choice == "required":
            calls = [
                _call_schema(name, self._accepted(name), f"#/items/anyOf/{i}") for i, name in enumerate(tools.schemas)
            ]
            array: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
            if not tools.is_parallel:
                array = {**array, "maxItems": 1}
            return self._json_guide(array if tools.strict else lenient(array))
        grammar = self.model.call_grammar
        if not tools.strict or grammar is None:
            return None
        text = auto_guide(
            grammar,
            tools.schemas,
            tools.strict,
            self.model.tokens,
            max_calls=self._max_calls,
            thinking=self._thinking_marks,
            is_thinking=self.is_thinking,
        )
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=text)

    def guide_parts(self) -> dict[str, pb.GuidedDecodingConfig]:
        """Return, for each tool whose arguments the request's guide restricts, a guide for its schema, by field."""
        tools = self.tools
        names = (
            tools.strict if tools.choice == "auto" else tools.schemas if tools.choice == "required" else {tools.named}
        )
        return {
            tool_field(name): pb.GuidedDecodingConfig(
                guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=json.dumps(self._parameters(name))
            )
            for name in tools.schemas
            if name in names
        }

    def leave_out(self, fields: Collection[str]) -> bool:
        """Change the guide so that it accepts any arguments for tools whose schemas do not compile, unless they are
        strict, or there are no others that may be called.
        """
        tools = self.tools
        odd = frozenset(name for name in tools.schemas if tool_field(name) in fields)
        if tools.choice != "required" or odd & tools.strict or odd == tools.schemas.keys():
            return False
        self._free = odd
        self.add_guide()
        return True

    @property
    def divide(self) -> Divide | None:
        """Returns the parts of a text that must be validated: the answer, if its schema is lenient, and the arguments
        of calls that no grammar restricts completely. None if there are none.
        """
        exact = self._exact_tools
        return self._parts if self._lenient_schema or not self.tools.schemas.keys() <= exact else None

    @property
    def _exact_tools(self) -> frozenset[str]:
        """Tools whose arguments a grammar restricts completely."""
        if self.tools.choice != "auto":
            return self.tools.strict
        grammar = self.model.call_grammar
        is_exact = self.model.constrains_calls and (grammar is None or grammar.is_exact)
        return self.tools.strict if is_exact else frozenset()

    def _parts(self, text: str) -> list[Part]:
        answer, calls = text, list[tuple[str, str]]()
        if self.reads_text:
            events = SequenceReader(self, "", 0).read(text, is_final=True)
            answer = "".join(event.text for event in events if isinstance(event, TextDelta))
            for event in events:
                if isinstance(event, CallBegin):
                    calls.append((event.name, ""))
                elif isinstance(event, CallArguments):
                    calls[-1] = calls[-1][0], calls[-1][1] + event.text
        exact = self._exact_tools
        parts = [
            Part(f"call {number} ({name})", json.dumps(self.tools.schemas[name]), arguments)
            for number, (name, arguments) in enumerate(calls)
            if name not in exact
        ]
        if self._lenient_schema and (answer or not calls):
            parts.append(Part("", self._lenient_schema, answer))
        return parts

    def _accepted(self, name: str) -> Schema:
        """Return the schema of a tool's arguments, as far as the guide of a required call applies it."""
        return {"type": "object"} if name in self._free else self.tools.schemas[name]

    def _parameters(self, name: str) -> Schema:
        """Return the schema of the arguments of a required call."""
        schema: Schema = {"type": "object", **self._accepted(name)}
        return schema if name in self.tools.strict else lenient(schema)

    @property
    def _has_channels_guide(self) -> bool:
        """Whether the grammar covers the channels of the output: those of gpt-oss, if JSON, `strict` tools or a call
        are asked for. If the output continues a message, it has no channels.
        """
        if not self.model.format.has_channels or self.options.continues_last:
            return False
        if self._is_guided:
            return self._asks_for_json
        return bool(self.tools.strict) or (self.tools.choice != "auto" and bool(self.tools.schemas))

    def _channels_guide(self) -> pb.GuidedDecodingConfig | None:
        """Return the grammar for reasoning in channels followed by a call or the answer; None if the schema of the
        requested format is invalid.
        """
        choice, tokens = self.tools.choice, self.model.tokens
        if choice != "auto" and self.tools.schemas:
            names = [self.tools.named] if choice == "named" else list(self.tools.schemas)
            required = {name: self._parameters(name) for name in names}
            text = channels_guide(required, names, None, tokens, requires_call=True)
            return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=text)
        schema = self._own_schema() if self._is_guided else None
        if self._is_guided and schema is None:
            return None
        tools = self.tools.schemas if self._may_call_instead or not self._is_guided else {}
        text = channels_guide(tools, self.tools.strict, schema, self.model.tokens)
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=text)

    def _joined_guide(self) -> pb.GuidedDecodingConfig | None:
        """Return the grammar for either calls or the requested format; None if its schema is invalid."""
        schema, grammar = self._own_schema(), self.model.call_grammar
        if schema is None or grammar is None:
            return None
        text = calls_or_json(
            grammar,
            self.tools.schemas,
            self.tools.strict,
            schema,
            self.model.tokens,
            max_calls=self._max_calls,
            thinking=self._thinking_marks,
            is_thinking=self.is_thinking,
        )
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=text)

    def _own_guide(self) -> pb.GuidedDecodingConfig | None:
        """Return the request's own guide, extended to allow reasoning before it; None if it needs no change."""
        if not self.is_thinking:
            return None
        if self.request.guided_decoding.guide_type in _JSON_GUIDES:
            schema = self._own_schema()
            return self._json_guide(schema) if schema is not None else None
        # The client's own grammar applies from the first token, so there is no reasoning: all text is the answer.
        self.is_thinking = False
        return None

    def _own_schema(self) -> Schema | None:
        """Return the schema of the JSON format that the request asks for; None if it is invalid."""
        guide = self.request.guided_decoding
        if guide.guide_type == pb.GUIDE_TYPE_JSON:
            return _ANY_JSON
        try:
            schema = parse_json(guide.guide)
        except ValueError:
            return None
        return schema if isinstance(schema, dict) else None

    @property
    def _max_calls(self) -> int | None:
        return None if self.tools.is_parallel else 1

    @property
    def _thinking_marks(self) -> tuple[str, str] | None:
        tags = self.model.format.reasoning
        return (tags.opening, tags.closing) if tags is not None else None

    def _json_guide(self, schema: Schema) -> pb.GuidedDecodingConfig:
        tags = self.model.format.reasoning
        if self.is_thinking and tags is not None:
            text = json_after_thinking(schema, tags.closing, self.model.tokens)
            return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=text)
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=json.dumps(schema))

    def parser(self) -> Machine:
        """Return a parser for the text of one sequence."""
        tools, known = self.tools, self.model.format
        offer = Offer(tools.schemas, self._max_calls, self.is_thinking)
        is_free = tools.choice == "auto" or not tools.schemas
        if (is_free and not self._is_guided) or self._has_channels_guide:
            return known.parser(offer)
        if self._may_call_instead and known.tools is not None:
            either: Script = partial(_calls_or_answer, known.tools)
            if known.reasoning is not None:
                either = after_thinking(known.reasoning, either, known.tools.ends_reasoning)
            return Machine(either, offer)
        # A grammar applies either from the first token or from the end of the reasoning.
        answer: Script = plain
        if not is_free:
            answer = partial(_arguments, tools.named) if tools.choice == "named" else llama.script
        if known.reasoning is not None and self.is_thinking:
            answer = after_thinking(known.reasoning, answer, ())
        return Machine(answer, offer)


class SequenceReader:
    """Reads the text of one sequence.

    Attributes:
        num_calls: Number of calls that have begun.
    """

    def __init__(self, conversation: Conversation, request_id: str, sequence: int) -> None:
        self.num_calls = 0
        self._parser = conversation.parser()
        self._call_id = partial(conversation.model.format.call_id, request_id, sequence)

    def read(self, text: str, *, is_final: bool) -> list[Event]:
        """Return the parser events for the next piece of text; every call has an id."""
        events = self._parser.feed(text)
        if is_final:
            events += self._parser.finish()
        return [self._with_id(event) if isinstance(event, CallBegin) else event for event in events]

    def _with_id(self, event: CallBegin) -> CallBegin:
        self.num_calls = event.index + 1
        return CallBegin(event.index, event.name, event.call_id or self._call_id(event.index, event.name))


def drop_format(request: pb.GenerateRequest, tools: Tools, name: str) -> list[str]:
    """Remove the JSON format of the answer if a call is required, since there is no answer then; return the fields that
    thus have no effect. Raises InvalidArgumentError if it is a regular expression or grammar.

    Args:
        name: The client's name for the format.
    """
    if tools.choice == "auto" or not request.HasField("guided_decoding"):
        return []
    if request.guided_decoding.guide_type not in _JSON_GUIDES:
        raise InvalidArgumentError(f"requires a call, which conflicts with {name}", field="tool_choice")
    request.ClearField("guided_decoding")
    return [name]


def tool_field(name: str) -> str:
    """Return the native field for the schema of a tool."""
    return f"guided_decoding.tools.{name}"


def keep_prefix(request: pb.GenerateRequest, num_tokens: int | None, duration_s: int) -> None:
    """Retain the KV cache of the prompt, or of its first `num_tokens` tokens, for longer than by default."""
    kept = request.kv_retention.token_ranges.add(start=0, priority=_KEPT_PRIORITY, duration_ms=duration_s * 1000)
    if num_tokens is not None:
        kept.end = num_tokens


def _calls_or_answer(tools: ToolFormat, machine: Machine) -> Steps[None]:
    """Parse calls if the text begins with one; otherwise all text is the answer, even if calls occur in it."""
    space = yield from machine.take_space()
    mark = yield from machine.accept(*tools.marks)
    machine.unread(space + (mark or ""))
    if mark:
        yield from tools.script(machine)


def _arguments(name: str, machine: Machine) -> Steps[None]:
    """Treat all text as the arguments of a call to the tool `name`; the call stays open if they are cut off."""
    pieces: list[str] = []

    def add(text: str) -> None:
        pieces.append(text)
        machine.arguments(text)

    yield from machine.take_space()
    if not (yield from machine.peek()):
        return  # the output ended before the call, for example within the reasoning
    machine.open_call(name)
    yield from machine.copy_until(add)
    if arguments_text("".join(pieces)) is not None:
        machine.close_call()


def _call_schema(name: str, parameters: Schema, pointer: str) -> dict[str, object]:
    """Return the schema of a call, to be placed at `pointer` in a document."""
    # Arguments are an object even if their schema does not say so.
    own = resource({"type": "object", **parameters}, pointer.removeprefix("#/").replace("/", "."))
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": own},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
