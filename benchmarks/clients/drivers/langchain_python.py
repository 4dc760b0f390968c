"""Run one stream of `langchain-openai`; see `benchmarks/clients/drivers/README.md` for the argument and the output."""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI

asked = json.loads(sys.argv[1])
options = {"stream_chunk_timeout": asked["idle_s"]} if asked.get("idle_s") else {}
model = ChatOpenAI(
    model="m", base_url=asked["url"] + "/v1", api_key="-", use_responses_api=asked["api"] == "responses", **options
)


async def read() -> str:
    text = ""
    async for chunk in model.astream(asked["prompt"]):
        text += chunk.text if isinstance(chunk.text, str) else chunk.text()
    return text


text, error = "", ""
try:
    text = asyncio.run(read())
except Exception as raised:
    error = f"{type(raised).__module__.partition('.')[0]}.{type(raised).__name__}"
print("RESULT " + json.dumps({"text": text, "error": error}))
