#!/bin/sh
# Claude Code leaves a stream after 300 seconds, although the server sends `ping` events.
#
# Guess before the run: `ping` is Anthropic's own event for streams that wait, so it counts as activity.
# Seen with Claude Code 2.1.197: pings every 15 seconds do not count; after 300 seconds it leaves and repeats the call
# without a stream. A `message_delta` without a stop reason counts.
#
# Needs node, npm and python3, and takes six minutes. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'kill $server 2> /dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-fund --no-audit @anthropic-ai/claude-code@2.1.197
cat > server.py <<'END'
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USAGE = {"input_tokens": 1, "output_tokens": 1}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
           "stop_sequence": None, "usage": USAGE}
TEXT = {"type": "text", "text": "done"}
FORMS = {
    "ping": {"type": "ping"},
    "message_delta": {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None},
                      "usage": {"output_tokens": 1}},
}
BEGIN = [{"type": "message_start", "message": MESSAGE}]
END = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "done"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"},
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        form = self.path.split("/")[1]
        if not body.get("stream"):
            data = json.dumps({**MESSAGE, "content": [TEXT], "stop_reason": "end_turn"}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        began = time.monotonic()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            self.send(BEGIN)
            while time.monotonic() - began < 330:
                time.sleep(15)
                self.send([FORMS[form]])
            self.send(END)
            self.wfile.write(b"0\r\n\r\n")
            left = "stayed"
        except OSError:
            left = "left"
        with open(f"{form}.seen", "a") as file:
            file.write(f"{form}: {left}\n")

    def send(self, events):
        data = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open("port", "w") as file:
    file.write(str(server.server_port))
server.serve_forever()
END
python3 server.py & server=$!
while ! [ -s port ]; do sleep 0.1; done
for form in ping message_delta; do
    mkdir "$form"
    (cd "$form" && env -i PATH="$PATH" HOME="$folder/$form" ANTHROPIC_API_KEY=- DISABLE_TELEMETRY=1 \
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 ANTHROPIC_BASE_URL="http://127.0.0.1:$(cat ../port)/$form" \
        ../node_modules/.bin/claude -p "Say done." < /dev/null > output 2>&1) &
    clients="${clients:-} $!"
done
wait $clients
sleep 16 # the server notices at its next event that a client has left
cat ping.seen message_delta.seen > seen
cat seen
diff seen - <<'END'
ping: left
message_delta: stayed
END
