"""Run one stream of `anthropic`; see `benchmarks/clients/drivers/README.md` for the argument and the output."""

import json
import sys

import anthropic

asked = json.loads(sys.argv[1])
options = {"timeout": asked["idle_s"]} if asked.get("idle_s") else {}
client = anthropic.Anthropic(base_url=asked["url"], api_key="-", **options)
text, error = "", ""
try:
    messages = [{"role": "user", "content": asked["prompt"]}]
    with client.messages.stream(model="m", max_tokens=64, messages=messages) as stream:
        for part in stream.text_stream:
            text += part
        stream.get_final_message()
except Exception as raised:
    error = f"{type(raised).__module__.partition('.')[0]}.{type(raised).__name__}"
print("RESULT " + json.dumps({"text": text, "error": error}))
