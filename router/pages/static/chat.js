import { askForToken, authorized } from "/static/token.js";

const byId = (id) => document.getElementById(id);
let turns = [];
let running = null;

async function showModel() {
  const answer = await fetch("/v1/models", { headers: authorized() });
  if (answer.status === 401) return askForToken(showModel);
  if (answer.ok) byId("model").textContent = (await answer.json()).data[0].id;
}

function addTurn(role, text) {
  const box = document.createElement("div");
  box.className = `turn ${role}`;
  box.textContent = text;
  byId("turns").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

/** Yield the JSON of each event of a stream, whose bytes may be split at any point. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function send(text) {
  addTurn("user", text);
  const asked = [...turns, { role: "user", content: text }];
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  const box = addTurn("assistant", "");
  const began = performance.now();
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: authorized({ "content-type": "application/json" }),
      body: JSON.stringify({ messages: asked, max_tokens: 1024, stream: true, stream_options: { include_usage: true } }),
      signal: running.signal,
    });
    if (answer.status === 401) {
      box.previousSibling.remove();
      box.remove();
      return askForToken(() => send(text));
    }
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      box.textContent += event.choices?.[0]?.delta?.content ?? "";
      box.scrollIntoView({ block: "end" });
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        byId("status").textContent = `${event.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`;
      }
    }
    turns = [...asked, { role: "assistant", content: box.textContent }];
  } catch (error) {
    if (error.name === "AbortError") turns = [...asked, { role: "assistant", content: box.textContent }];
    else addTurn("error", error.message);
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  send(text);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("reset").addEventListener("click", () => {
  running?.abort();
  turns = [];
  byId("turns").replaceChildren();
  byId("status").textContent = "";
});
showModel();
