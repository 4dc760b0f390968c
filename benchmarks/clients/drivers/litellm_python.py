"""Run one stream of `litellm`; see `benchmarks/clients/drivers/README.md` for the argument and the output."""

import json
import sys

import litellm

asked = json.loads(sys.argv[1])
options = {"timeout": asked["idle_s"]} if asked.get("idle_s") else {}
messages = [{"role": "user", "content": asked["prompt"]}]
text, error = "", ""
try:
    for chunk in litellm.completion(
        model="openai/m", api_base=asked["url"] + "/v1", api_key="-", messages=messages, stream=True, **options
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
except Exception as raised:
    error = f"{type(raised).__module__.partition('.')[0]}.{type(raised).__name__}"
print("RESULT " + json.dumps({"text": text, "error": error}))
