"""Run one stream of `openai`; see `benchmarks/clients/drivers/README.md` for the argument and the output."""

import json
import sys

import openai

asked = json.loads(sys.argv[1])
options = {"timeout": asked["idle_s"]} if asked.get("idle_s") else {}
client = openai.OpenAI(base_url=asked["url"] + "/v1", api_key="-", **options)
text, error = "", ""
try:
    if asked["api"] == "chat":
        messages = [{"role": "user", "content": asked["prompt"]}]
        for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    elif asked["api"] == "completions":
        for chunk in client.completions.create(model="m", prompt=asked["prompt"], stream=True):
            text += chunk.choices[0].text if chunk.choices else ""
    else:
        for event in client.responses.create(model="m", input=asked["prompt"], stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
except Exception as raised:
    error = f"{type(raised).__module__.partition('.')[0]}.{type(raised).__name__}"
print("RESULT " + json.dumps({"text": text, "error": error}))
