#!/bin/sh
# LangChain adds up the `output_tokens` of all `message_delta` events of a stream, although they are totals.
#
# Guess before the run: Anthropic documents the usage in `message_delta` as cumulative, so the last one counts, as in
# Anthropic's own client.
# Seen with langchain-anthropic 1.7.10 and anthropic 2.14.0: of a stream with the totals 3, 5 and 9, Anthropic's client
# reports 9, and LangChain reports 17.
#
# Needs python3. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'kill $server 2> /dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q langchain-anthropic==1.7.10 anthropic==2.14.0
cat > server.py <<'END'
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
           "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 0}}


def total(tokens, reason=None):
    delta = {"stop_reason": reason, "stop_sequence": None}
    return {"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}}


EVENTS = [
    {"type": "message_start", "message": MESSAGE},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    total(3),
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "done"}},
    total(5),
    {"type": "content_block_stop", "index": 0},
    total(9, "end_turn"),
    {"type": "message_stop"},
]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in EVENTS:
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open("port", "w") as file:
    file.write(str(server.server_port))
server.serve_forever()
END
cat > clients.py <<'END'
import sys

import anthropic
from langchain_anthropic import ChatAnthropic

url = f"http://127.0.0.1:{sys.argv[1]}"
messages = [{"role": "user", "content": "Say done."}]
with anthropic.Anthropic(base_url=url, api_key="-").messages.stream(model="m", max_tokens=9, messages=messages) as stream:
    print("anthropic", stream.get_final_message().usage.output_tokens)
whole = None
for chunk in ChatAnthropic(model="m", max_tokens=9, base_url=url, api_key="-").stream("Say done."):
    whole = chunk if whole is None else whole + chunk
print("langchain-anthropic", whole.usage_metadata["output_tokens"])
END
python3 server.py & server=$!
while ! [ -s port ]; do sleep 0.1; done
env -i PATH="$PATH" HOME="$folder" venv/bin/python clients.py "$(cat port)" > seen
cat seen
diff seen - <<'END'
anthropic 9
langchain-anthropic 17
END
