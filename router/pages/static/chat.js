// The chat. The conversation and the settings are kept in the browser's local storage.
import { copyButton } from "/static/copy.js";
import { markdown } from "/static/markdown.js";
import { completion, Denied } from "/static/stream.js";
import { askForToken, authorized } from "/static/token.js";

const TURNS_KEY = "midstream-chat";
const SETTINGS_KEY = "midstream-chat-settings";
const SETTINGS = ["system", "temperature", "max-tokens"];
const DEFAULT_MAX_TOKENS = 1024;
const byId = (id) => document.getElementById(id);

// Each turn is {role, content, note}; a note is about the end of an answer, and is not sent.
let turns = stored(TURNS_KEY, []);
let running = null;
let unfinished = null; // the question and the answer that is being received

function stored(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Keep a value; return whether the browser did, which may have no room, or storage turned off. */
function keep(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function save() {
  if (!keep(TURNS_KEY, [...turns, ...(unfinished ?? [])])) byId("status").textContent = "This browser does not keep the conversation.";
}

async function showModels() {
  const answer = await fetch("/v1/models", { headers: authorized() }).catch(() => null);
  if (answer?.status === 401) return askForToken(showModels);
  if (!answer?.ok) return;
  const names = (await answer.json()).data.map((model) => model.id);
  byId("model").textContent = names[0];
  byId("models").replaceChildren(...names.map((name) => new Option(name, name)));
  byId("choice").hidden = names.length < 2;
}

function showState() {
  byId("empty").hidden = byId("turns").childElementCount > 0;
  byId("send").hidden = running !== null;
  byId("send").disabled = !byId("text").value.trim();
  byId("stop").hidden = running === null;
  byId("reset").disabled = byId("turns").childElementCount === 0;
}

/** Add a message; returns functions that show its text, and that end it. */
function addTurn(role) {
  const box = document.createElement("article");
  box.className = `turn ${role}`;
  box.setAttribute("aria-label", { user: "You", assistant: "Answer", error: "Error" }[role]);
  const reasoning = document.createElement("details");
  reasoning.hidden = true;
  const thoughts = document.createElement("p");
  reasoning.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }), thoughts);
  const text = document.createElement("div");
  text.className = role === "assistant" ? "text markdown" : "text";
  box.append(reasoning, text);
  byId("turns").append(box);
  return {
    box,
    show(content, thought = "") {
      const isFollowed = innerHeight + scrollY > document.documentElement.scrollHeight - 80;
      if (role === "assistant") text.replaceChildren(markdown(content));
      else text.textContent = content;
      reasoning.hidden = !thought;
      thoughts.textContent = thought;
      if (isFollowed) scrollTo({ top: document.documentElement.scrollHeight });
    },
    end(content, note = "") {
      box.removeAttribute("aria-busy");
      for (const pre of text.querySelectorAll("pre")) frameCode(pre);
      const foot = document.createElement("p");
      foot.className = "foot muted";
      if (note) foot.append(note);
      if (content && role === "assistant") foot.prepend(copyButton("Copy the answer", () => content));
      if (foot.childNodes.length) box.append(foot);
    },
  };
}

function frameCode(pre) {
  const frame = document.createElement("div");
  frame.className = "code";
  const head = document.createElement("div");
  head.className = "muted";
  head.append(pre.dataset.language || "code", copyButton("Copy this code", () => pre.textContent));
  pre.replaceWith(frame);
  frame.append(head, pre);
}

function addEnded({ role, content, note }) {
  const turn = addTurn(role);
  turn.show(content);
  turn.end(content, note);
}

function requestBody(asked) {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, byId(name).value.trim()]));
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const body = {
    messages: [...system, ...asked.map(({ role, content }) => ({ role, content }))],
    max_tokens: Number(settings["max-tokens"] || DEFAULT_MAX_TOKENS),
  };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (byId("models").value) body.model = byId("models").value;
  return body;
}

async function send(text) {
  const conversation = turns;
  const question = { role: "user", content: text };
  const numBefore = byId("turns").childElementCount;
  addEnded(question);
  const turn = addTurn("assistant");
  turn.box.setAttribute("aria-busy", "true");
  const answer = { role: "assistant", content: "", note: "Not finished: the page was left." };
  let thought = "";
  let frame = 0;
  let failure = null;
  const draw = () => {
    frame = 0;
    turn.show(answer.content, thought);
  };
  const began = performance.now();
  const controller = new AbortController();
  running = controller;
  unfinished = [question, answer];
  const say = (words) => {
    if (running === controller) byId("status").textContent = words;
  };
  say("Answering");
  showState();
  save();
  turn.box.scrollIntoView({ block: "end" });
  let note = "";
  let end = "";
  try {
    const onBreak = () => say("Connection lost; trying again");
    for await (const { choices, usage } of completion(requestBody([...turns, question]), controller.signal, onBreak)) {
      say("Answering");
      const delta = choices?.[0]?.delta ?? {};
      answer.content += delta.content ?? "";
      thought += delta.reasoning_content ?? "";
      if (choices?.[0]?.finish_reason === "length") note = "Cut off at the limit of tokens.";
      if (usage) end = `${usage.completion_tokens} tokens in ${((performance.now() - began) / 1000).toFixed(1)} s`;
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === "AbortError") note = end = "Stopped.";
    else failure = error;
  }
  cancelAnimationFrame(frame);
  draw();
  turn.end(answer.content, note);
  if (running !== controller) return; // another conversation has begun
  say(end);
  running = unfinished = null;
  if (!failure) conversation.push(question, { ...answer, note });
  else showFailure(failure, text, answer.content ? null : turn, numBefore);
  save();
  showState();
}

function removeAfter(number) {
  while (byId("turns").childElementCount > number) byId("turns").lastChild.remove();
}

/** Show an error below a question, or ask for a key; `turn` is an empty answer. */
function showFailure(error, text, turn, numBefore) {
  const again = () => {
    removeAfter(numBefore);
    send(text);
  };
  turn?.box.remove();
  if (error instanceof Denied) {
    removeAfter(numBefore);
    return askForToken(again);
  }
  const box = addTurn("error");
  box.show(error.message);
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Try again" });
  button.addEventListener("click", again);
  box.box.append(button);
  box.box.scrollIntoView({ block: "end" });
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  send(text);
});
byId("text").addEventListener("input", showState);
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("text").focus();
});
byId("reset").addEventListener("click", () => {
  running?.abort();
  running = unfinished = null;
  turns = [];
  keep(TURNS_KEY, []);
  byId("turns").replaceChildren();
  byId("status").textContent = "";
  byId("text").focus();
  showState();
});
byId("suggestions").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON" || running) return;
  byId("text").focus();
  send(target.textContent);
});
for (const [name, value] of Object.entries(stored(SETTINGS_KEY, {}))) if (SETTINGS.includes(name)) byId(name).value = value;
byId("settings").addEventListener("input", () => {
  keep(SETTINGS_KEY, Object.fromEntries(SETTINGS.map((name) => [name, byId(name).value])));
});
addEventListener("pagehide", () => unfinished && save());

for (const turn of turns) addEnded(turn);
showState();
showModels();
