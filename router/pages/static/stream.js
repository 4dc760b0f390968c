// The events of a completion, which goes on at any router if its connection breaks.
import { authorized } from "/static/token.js";

const SILENCE_MS = 30000; // as long as a scheduler keeps a request without a client
const WAIT_MS = 500;

export class Denied extends Error {}

/**
 * Yield the chunks of a chat completion. A broken connection is made again, and goes on after the last chunk; `onBreak` is
 * called each time.
 */
export async function* completion(body, signal, onBreak) {
  const request = JSON.stringify({ ...body, request_id: randomId(), stream: true, stream_options: { include_usage: true } });
  let lastId = "";
  let heardAt = performance.now();
  for (;;) {
    let problem = "The router does not respond.";
    try {
      const headers = authorized({ "content-type": "application/json", ...(lastId ? { "last-event-id": lastId } : {}) });
      const answer = await fetch("/v1/chat/completions", { method: "POST", headers, body: request, signal });
      if (answer.status === 401) throw new Denied();
      if (answer.ok) {
        for await (const { id, data } of events(answer.body)) {
          heardAt = performance.now();
          if (id) lastId = id;
          if (data === "[DONE]") return;
          if (!data) continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Error(chunk.error.message);
          yield chunk;
        }
      } else {
        problem = await messageOf(answer);
        if (answer.status !== 503) throw new Error(problem);
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // fetch and its reader throw TypeErrors if a connection breaks
    }
    if (performance.now() - heardAt > SILENCE_MS) throw new Error(problem);
    onBreak();
    await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
    signal.throwIfAborted();
  }
}

async function messageOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The router responded with status ${answer.status}: ${text.slice(0, 200)}`;
  }
}

/** Yield the id and the data of each event of a stream, whose bytes may be split at any point. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n");
        const of = (name) => lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trim());
        yield { id: of("id")[0], data: of("data").join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
