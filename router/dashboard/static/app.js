// The dashboard. It keeps the latest state and the samples of the last few minutes, and draws both at each update.

import { LineChart } from "./chart.js";
import { askForToken } from "/static/token.js";
import { byId, element } from "./dom.js";
import { follow } from "./feed.js";
import { redrawGroups, showGroups } from "./groups.js";
import { count, milliseconds, percent, rate } from "./text.js";

const MAX_SAMPLES = 300;
const THEME_KEY = "midstream-theme";
const STATES = [["generation", "generating"], ["context", "in context"], ["queued", "queued"], ["paused", "paused"]];
const STATE_WORDS = {
  SERVING: "● serving", DEGRADED: "▲ degraded", DRAINING: "◐ draining", LOST: "✕ lost", UNKNOWN: "? unknown",
};
const REASONS = ["stop", "length", "abort", "deadline", "error"];

let samples = [];
let latest = null;
let seconds = MAX_SAMPLES;
let isPaused = false;

const charts = [
  new LineChart(byId("charts"), {
    title: "Tokens per second", format: rate,
    series: [
      { label: "generated", kind: "a", value: (sample) => sample.generatedTokensPerS },
      { label: "prompt", kind: "b", value: (sample) => sample.promptTokensPerS },
    ],
  }),
  new LineChart(byId("charts"), {
    title: "Requests", format: rate,
    series: [
      { label: "running", kind: "a", value: (sample) => sample.numRunning },
      { label: "waiting", kind: "b", value: (sample) => sample.numWaiting },
    ],
  }),
  new LineChart(byId("charts"), {
    title: "Time to first token", format: milliseconds,
    series: [
      { label: "median", kind: "a", value: (sample) => sample.timeToFirstTokenP50Ms },
      { label: "95th percentile", kind: "b", value: (sample) => sample.timeToFirstTokenP95Ms },
    ],
  }),
  new LineChart(byId("charts"), {
    title: "Time between tokens", format: milliseconds,
    series: [
      { label: "median", kind: "a", value: (sample) => sample.interTokenP50Ms },
      { label: "95th percentile", kind: "b", value: (sample) => sample.interTokenP95Ms },
    ],
  }),
];

function onState(state, isFirst) {
  samples = (isFirst ? state.samples : [...samples, ...state.samples]).slice(-MAX_SAMPLES);
  latest = state;
  byId("main").hidden = false;
  if (!isPaused) show();
}

function onLink(state, text) {
  byId("link").dataset.state = state;
  if (byId("link-text").textContent !== text) byId("link-text").textContent = text;
  byId("main").classList.toggle("is-old", state !== "live");
}

function show() {
  const end = Number(samples.at(-1).timeUnixMs);
  const shown = samples.filter((sample) => Number(sample.timeUnixMs) >= end - 1000 * seconds);
  const outages = latest.outages.filter((outage) => endOf(outage, end) >= end - 1000 * seconds);
  for (const chart of charts) chart.show(shown, seconds, outages.map((outage) => [Number(outage.fromUnixMs), endOf(outage, end)]));
  showOutages(outages, end);
  showTiles(samples.at(-1), latest);
  showRequests(latest);
  showParts(latest.parts);
  showGroups(latest.groups);
  byId("what").textContent = `${latest.model} · via ${latest.routerId}`;
  byId("foot").textContent =
    `Midstream ${latest.version} · latencies over the last ${latest.latencyWindowS} s · ${new Date(end).toLocaleTimeString()}`;
}

/** Returns when an outage ended, or the time of the newest sample. */
function endOf(outage, now) {
  return Number(outage.untilUnixMs ?? now);
}

/** Shows each component's outages on a time line, those that are not over in full colour. */
function showOutages(outages, now) {
  byId("no-outages").hidden = outages.length > 0;
  byId("outages").hidden = !outages.length;
  const rows = new Map();
  for (const outage of outages) {
    const key = JSON.stringify([outage.kind, outage.name]);
    rows.set(key, [...(rows.get(key) ?? []), outage]);
  }
  const share = (time) => 100 * Math.max(0, 1 - (now - time) / (1000 * seconds));
  byId("outages").tBodies[0].replaceChildren(...[...rows.values()].map((of) => {
    const spans = of.map((outage) => {
      const span = element("span", { class: outage.untilUnixMs ? "outage" : "outage is-open" });
      const from = share(Number(outage.fromUnixMs));
      span.style.left = `${from}%`;
      span.style.width = `${share(endOf(outage, now)) - from}%`;
      return span;
    });
    const last = of.at(-1);
    const lost = ((endOf(last, now) - Number(last.fromUnixMs)) / 1000).toFixed(1);
    const ago = Math.round((now - Number(last.fromUnixMs)) / 1000);
    const times = of.length > 1 ? `${of.length} times, last ` : "";
    const words = last.untilUnixMs ? `${times}${lost} s, ${ago} s ago` : `${times}${lost} s, still lost`;
    return element("tr", {},
      element("td", {}, last.kind), element("td", {}, last.name),
      element("td", { class: "track" }, element("div", { class: "timeline" }, ...spans)),
      element("td", { class: "muted" }, words));
  }));
}

function showTiles(sample, { requests, groups, counts, latencyWindowS }) {
  const say = (name, text, more) => {
    byId(`tile-${name}`).textContent = text;
    byId(`tile-${name}-more`).textContent = more;
  };
  const sum = (name) => groups.reduce((total, group) => total + group[name], 0);
  say("tokens", rate(sample.generatedTokensPerS), `and ${rate(sample.promptTokensPerS)} of prompts`);
  const p95 = (value) => (value === undefined ? `none in the last ${latencyWindowS} s` : `95th percentile ${milliseconds(value)}`);
  say("first", milliseconds(sample.timeToFirstTokenP50Ms), p95(sample.timeToFirstTokenP95Ms));
  say("inter", milliseconds(sample.interTokenP50Ms), p95(sample.interTokenP95Ms));
  const queue = sample.queueTimeP95Ms === undefined ? "" : `, in the queue up to ${milliseconds(sample.queueTimeP95Ms)}`;
  say("requests", count(sample.numRunning), `running, ${count(requests.numQueued + requests.numPaused)} waiting${queue}`);
  say("kv", percent(sample.kvUsage), `${count(sum("numHeldBlocks"))} of ${count(sum("numBlocks"))} blocks`);
  const looked = Number(counts.prefixCacheQueries);
  say("prefix", percent(Number(counts.prefixCacheHits) / looked), `of ${count(looked)} looked up`);
}

function showRequests({ requests, counts }) {
  const numbers = STATES.map(([state, label]) => [state, label, requests[`num${state[0].toUpperCase()}${state.slice(1)}`]]);
  const total = numbers.reduce((sum, [, , number]) => sum + number, 0);
  byId("states-bar").replaceChildren(...numbers.filter(([, , number]) => number).map(([state, , number]) => {
    const part = element("span", { class: `s-${state}` });
    part.style.width = `${100 * number / total}%`;
    return part;
  }));
  byId("states-bar").setAttribute("aria-label", numbers.map(([, label, number]) => `${number} ${label}`).join(", "));
  byId("states").replaceChildren(...numbers.map(([state, label, number]) =>
    element("li", {}, element("span", { class: `swatch s-${state}` }), element("b", {}, count(number)), label)));
  const ended = counts.numFinishedByReason;
  const reasons = [...REASONS, ...Object.keys(ended).filter((reason) => !REASONS.includes(reason))];
  byId("ended").replaceChildren(...reasons.map((reason) =>
    element("li", {}, element("b", {}, count(ended[reason] ?? 0)), reason)));
  byId("events").textContent =
    `Paused ${count(counts.numPreemptions)} times, recovered from a lost worker ${count(counts.numRecoveries)} times; ` +
    `workers lost: ${count(counts.numWorkerDeaths)}.`;
}

function showParts(parts) {
  byId("parts").replaceChildren(...parts.map((part) => element("tr", {},
    element("td", {}, part.kind),
    element("td", {}, part.name),
    element("td", {}, element("span", { class: "state", "data-state": part.state }, STATE_WORDS[part.state] ?? part.state)),
    element("td", { class: "muted" }, part.detail))));
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    seconds = Number(button.dataset.window);
    for (const other of document.querySelectorAll("[data-window]")) other.setAttribute("aria-pressed", String(other === button));
    if (latest) show();
  });
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Resume" : "Pause";
  if (latest) show();
});

byId("tables").addEventListener("click", () => {
  const isShown = byId("tables").getAttribute("aria-pressed") !== "true";
  byId("tables").setAttribute("aria-pressed", String(isShown));
  for (const chart of charts) chart.showTable(isShown);
});

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME_KEY, theme);
  byId("theme").textContent = `Theme: ${theme}`;
  redrawGroups();
}

byId("theme").addEventListener("click", () => {
  const themes = ["system", "light", "dark"];
  setTheme(themes[(themes.indexOf(localStorage.getItem(THEME_KEY)) + 1) % themes.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawGroups);

async function run() {
  await follow({ onLink, onState });
  askForToken(run);
}

const theme = localStorage.getItem(THEME_KEY);
setTheme(theme === "light" || theme === "dark" ? theme : "system");
run();
