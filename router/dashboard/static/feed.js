// The feed of states, which reconnects as long as the page is open.

import { authorized } from "/static/token.js";

const SILENCE_MS = 5000;
const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 5000;

/**
 * Follows the feed until it requires a key. Callbacks: `onLink(state, text)` with live, lost or denied;
 * `onState(state, isFirst)`, where the first state on a connection contains the samples of the last few minutes.
 */
export async function follow({ onLink, onState }) {
  let waitMs = FIRST_WAIT_MS;
  for (;;) {
    try {
      await readOnce((state, isFirst) => {
        waitMs = FIRST_WAIT_MS;
        onLink("live", "Live");
        onState(state, isFirst);
      });
      onLink("lost", "The router closed the connection; trying again");
    } catch (error) {
      if (error instanceof Denied) {
        onLink("denied", "API key required");
        return;
      }
      onLink("lost", error instanceof Refused ? error.message : "The router does not respond; trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
    waitMs = Math.min(2 * waitMs, LAST_WAIT_MS);
  }
}

class Denied extends Error {}
class Refused extends Error {}

async function readOnce(onState) {
  const quitter = new AbortController();
  let timer = setTimeout(() => quitter.abort(), SILENCE_MS);
  try {
    const response = await fetch("/dashboard/feed", { headers: authorized(), signal: quitter.signal, cache: "no-store" });
    if (response.status === 401) throw new Denied();
    if (!response.ok) throw new Refused(`The router responded with status ${response.status}; trying again`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    let isFirst = true;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => quitter.abort(), SILENCE_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        onState(JSON.parse(event.slice("data: ".length)), isFirst);
        isFirst = false;
      }
    }
  } finally {
    clearTimeout(timer);
    quitter.abort();
  }
}
