"""Programs that run one stream with one client.

Each gets one argument, a JSON object with `url`, `api`, `prompt` and `idle_s` (0 for the client's own limit), and
prints a line `RESULT {"text": …, "error": …}`.
"""

from __future__ import annotations

_PYTHON = """
import asyncio, json, sys
asked = json.loads(sys.argv[1])
url, api, prompt, idle_s = asked["url"], asked["api"], asked["prompt"], asked["idle_s"]
messages = [{"role": "user", "content": prompt}]
parts, error = [], ""
READ
try:
    asyncio.run(read())
except Exception as raised:
    cause = raised.__cause__
    error = f"{type(raised).__module__.partition('.')[0]}.{type(raised).__name__}"
print("RESULT " + json.dumps({"text": "".join(parts), "error": error}))
"""

_OPENAI = """
import openai
async def read():
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", **({"timeout": idle_s} if idle_s else {}))
    if api == "chat/completions":
        async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
            parts.extend(choice.delta.content or "" for choice in chunk.choices)
    elif api == "completions":
        async for chunk in await client.completions.create(model="m", prompt=prompt, stream=True):
            parts.extend(choice.text for choice in chunk.choices)
    else:
        async for event in await client.responses.create(model="m", input=prompt, stream=True):
            parts.append(event.delta if event.type == "response.output_text.delta" else "")
"""

_ANTHROPIC = """
import anthropic
async def read():
    client = anthropic.AsyncAnthropic(base_url=url, api_key="-", **({"timeout": idle_s} if idle_s else {}))
    async with client.messages.stream(model="m", max_tokens=64, messages=messages) as stream:
        async for text in stream.text_stream:
            parts.append(text)
        await stream.get_final_message()
"""

_LANGCHAIN = """
from langchain_openai import ChatOpenAI
async def read():
    options = {"stream_chunk_timeout": idle_s} if idle_s else {}
    model = ChatOpenAI(model="m", base_url=url + "/v1", api_key="-", use_responses_api=api == "responses", **options)
    async for chunk in model.astream(prompt):
        parts.append(chunk.text if isinstance(chunk.text, str) else chunk.text())
"""

_LITELLM = """
import litellm
async def read():
    options = {"timeout": idle_s} if idle_s else {}
    async for chunk in await litellm.acompletion(
        model="openai/m", api_base=url + "/v1", api_key="-", messages=messages, stream=True, **options
    ):
        parts.extend(choice.delta.content or "" for choice in chunk.choices)
"""

_GRPC = """
import grpc
async def read():
    async with grpc.aio.insecure_channel(url.removeprefix("http://")) as channel:
        try:
            async for message in channel.unary_stream(api)(b""):
                parts.append(message.decode())
        except grpc.RpcError as raised:
            globals()["error"] = f"{raised.code().name}: {raised.details()}"
"""

_NODE = """
const asked = JSON.parse(process.argv[2]);
const { url, api, prompt, idle_s } = asked;
const messages = [{ role: "user", content: prompt }];
let text = "", error = "";
try {
  READ
} catch (raised) {
  error = `${raised.constructor.name}: ${raised.message}` + (raised.cause ? ` (${raised.cause.message})` : "");
}
console.log("RESULT " + JSON.stringify({ text, error }));
process.exit(0);
"""

_OPENAI_NODE = """
  const client = new OpenAI({ baseURL: url + "/v1", apiKey: "-" });
  if (api === "chat/completions") {
    for await (const chunk of await client.chat.completions.create({ model: "m", messages, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
  } else if (api === "completions") {
    for await (const chunk of await client.completions.create({ model: "m", prompt, stream: true }))
      text += chunk.choices[0]?.text ?? "";
  } else {
    for await (const event of await client.responses.create({ model: "m", input: prompt, stream: true }))
      text += event.type === "response.output_text.delta" ? event.delta : "";
  }
"""

_ANTHROPIC_NODE = """
  const client = new Anthropic({ baseURL: url, apiKey: "-" });
  const stream = client.messages.stream({ model: "m", max_tokens: 64, messages });
  stream.on("text", (part) => (text += part));
  await stream.finalMessage();
"""

_AI_SDK = """
  const openai = createOpenAI({ baseURL: url + "/v1", apiKey: "-" });
  const models = { responses: openai.responses, completions: openai.completion, "chat/completions": openai.chat };
  const model = models[api]("m");
  const timeout = idle_s ? { timeout: { chunkMs: idle_s * 1000 } } : {};
  const result = streamText({ model, prompt, onError() {}, ...timeout });
  let reason = "";
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") text += part.text;
    if (part.type === "error") error = `${part.error?.constructor?.name}: ${part.error?.message ?? part.error}`;
    if (part.type === "abort") error = `abort: ${part.reason ?? ""}`;
    if (part.type === "finish") reason = part.finishReason;
  }
  if (!error && reason !== "stop") error = `finish reason ${reason}`;
"""

_GRPC_NODE = """
  const client = new grpc.Client(url.replace("http://", ""), grpc.credentials.createInsecure());
  const same = (data) => data;
  const call = client.makeServerStreamRequest(api, same, same, Buffer.alloc(0));
  call.on("data", (data) => (text += data.toString()));
  call.on("error", () => {});
  const status = await new Promise((resolve) => call.on("status", resolve));
  if (status.code) error = `${grpc.status[status.code]}: ${status.details}`;
"""

PYTHON = {
    name: _PYTHON.replace("READ", read)
    for name, read in (
        ("openai", _OPENAI),
        ("anthropic", _ANTHROPIC),
        ("langchain-openai", _LANGCHAIN),
        ("litellm", _LITELLM),
        ("grpcio", _GRPC),
    )
}
NODE = {
    name: "\n".join(imports) + _NODE.replace("READ", read.strip())
    for name, imports, read in (
        ("openai", ['import OpenAI from "openai";'], _OPENAI_NODE),
        ("@anthropic-ai/sdk", ['import Anthropic from "@anthropic-ai/sdk";'], _ANTHROPIC_NODE),
        (
            "ai",
            ['import { createOpenAI } from "@ai-sdk/openai";', 'import { streamText } from "ai";'],
            _AI_SDK,
        ),
        ("@grpc/grpc-js", ['import grpc from "@grpc/grpc-js";'], _GRPC_NODE),
    )
}
