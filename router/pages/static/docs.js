// The API reference, from /openapi.json.
import { copyButton } from "/static/copy.js";
import { typeOf, withoutNull } from "/static/schema.js";
import { askForToken, authorized, hasToken } from "/static/token.js";

const MAX_DEPTH = 2;
// Values of path parameters: ids that examples have returned.
const known = new Map();

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

/** Return an element with a text, in which code is between backticks. */
function words(tag, text) {
  return element(tag, "", ...text.split("`").map((part, index) => (index % 2 ? element("code", part) : part)));
}

function table(head, rows) {
  const box = element("div", "", element("table", "",
    element("thead", "", element("tr", "", ...head.map((name) => element("th", name)))),
    element("tbody", "", ...rows.map((cells) => element("tr", "", ...cells.map((cell) => words("td", cell)))))));
  box.className = "scroll";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", head[0]);
  return box;
}

/** Return the rows of the fields of an object, and of objects in it. */
function fieldRows(schema, schemas, prefix = "", depth = 0) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).flatMap(([name, nullable]) => {
    const field = withoutNull(nullable);
    const path = prefix + name;
    const row = [path + (required.has(name) ? " (required)" : ""), typeOf(field), nullable.description ?? ""];
    if (depth >= MAX_DEPTH) return [row];
    const list = field.type === "array";
    const inner = withoutNull(list ? field.items : field);
    const object = inner?.$ref ? schemas[inner.$ref.split("/").pop()] : inner;
    return [row, ...(object?.properties ? fieldRows(object, schemas, `${path}${list ? "[]" : ""}.`, depth + 1) : [])];
  });
}

function describe(path, method, operation, schemas, ownsParameter) {
  const title = element("summary", "", element("code", `${method.toUpperCase()} ${path}`), words("span", ` ${operation.summary ?? ""}`));
  const box = element("details", "", title);
  box.className = "card";
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(contents(path, method, operation, schemas, ownsParameter));
  });
  return box;
}

function contents(path, method, operation, schemas, ownsParameter) {
  const body = element("div", "");
  body.className = "body";
  if (operation.description) body.append(words("p", operation.description));
  const parameters = operation.parameters ?? [];
  const [kind, media] = Object.entries(operation.requestBody?.content ?? {})[0] ?? [];
  body.append(...example(path, method, parameters, kind, media, ownsParameter));
  if (parameters.length) {
    body.append(table(["Parameter", "In", "Type", "Meaning"], parameters.map((of) =>
      [of.name + (of.required ? " (required)" : ""), of.in, typeOf(of.schema), of.description ?? ""])));
  }
  if (media) body.append(table(["Field", "Type", "Meaning"], fieldRows(media.schema, schemas)));
  return body;
}

/** Return the parts of an example that runs. */
function example(path, method, parameters, kind, media, ownsParameter) {
  const needed = parameters.filter((of) => of.required);
  const inputs = new Map(needed.filter((of) => of.in === "path").map((of) => {
    const input = element("input", "");
    input.value = known.get(of.name) ?? of.example ?? "";
    input.placeholder = of.name;
    input.dataset.parameter = of.name;
    return [of.name, input];
  }));
  const fixed = Object.fromEntries(needed.filter((of) => of.in === "header").map((of) => [of.name, of.schema.enum.at(-1)]));
  const text = element("textarea", "");
  const isForm = kind === "multipart/form-data";
  const values = { ...media?.example };
  for (const [name, id] of known) for (const field of Object.keys(values)) if (field.endsWith(`_${name}`)) values[field] = id;
  text.value = isForm ? values.file : JSON.stringify(values, null, 2);
  text.rows = Math.min(text.value.split("\n").length + 1, 14);
  text.spellcheck = false;
  text.setAttribute("aria-label", isForm ? "Contents of the file" : "Body of the example");
  const command = element("pre", "");
  command.tabIndex = 0;
  const url = () => path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(inputs.get(name)?.value ?? ""));
  const show = () => { command.textContent = curl(method, url(), fixed, isForm ? values : media && text.value, isForm); };
  for (const input of [...inputs.values(), text]) input.addEventListener("input", show);
  show();
  const head = element("div", "", "curl", copyButton("Copy the command", () => command.textContent));
  head.className = "muted";
  const code = element("div", "", head, command);
  code.className = "code";
  const run = element("button", "Run");
  run.type = "submit";
  run.className = "main";
  const labels = [...inputs].map(([name, input]) => element("label", "", `${name} `, input));
  const form = element("form", "", ...labels, run);
  form.className = "try";
  const answer = element("div", "");
  answer.className = "answer";
  answer.setAttribute("role", "status");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run.disabled = true;
    await send(method, url(), fixed, media && (isForm ? formOf(values, text.value) : text.value), isForm, answer, (value) => {
      const id = value.id ?? value.data?.[0]?.id;
      if (ownsParameter && id) known.set(ownsParameter, id);
      if (value.choices) known.set("receipt_id", value.id);
      for (const input of document.querySelectorAll("[data-parameter]")) {
        if (!input.value) input.value = known.get(input.dataset.parameter) ?? "";
        input.dispatchEvent(new Event("input"));
      }
    }, () => form.requestSubmit());
    run.disabled = false;
  });
  return [...(media ? [text] : []), form, code, answer];
}

function formOf(values, file) {
  const form = new FormData();
  for (const [name, value] of Object.entries(values)) if (name !== "file") form.append(name, value);
  form.append("file", new Blob([file]), "requests.jsonl");
  return form;
}

function curl(method, url, headers, body, isForm) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const words = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${location.origin}${url}`];
  if (hasToken()) words.push('-H "authorization: Bearer $MIDSTREAM_API_KEY"');
  for (const [name, value] of Object.entries(headers)) words.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (isForm) words.push(...Object.entries(body).map(([name, value]) => `-F ${name}=${name === "file" ? "@requests.jsonl" : value}`));
  else if (body) words.push("-H 'content-type: application/json'", `-d ${quoted(body)}`);
  return words.join(" \\\n  ");
}

async function send(method, url, headers, body, isForm, box, onValue, again) {
  const began = performance.now();
  const output = element("pre", "");
  output.tabIndex = 0;
  const note = element("p", "Running");
  note.className = "muted";
  box.replaceChildren(note, output);
  try {
    const kind = body && !isForm ? { "content-type": "application/json" } : {};
    const answer = await fetch(url, { method: method.toUpperCase(), headers: authorized({ ...headers, ...kind }), body });
    if (answer.status === 401) {
      box.replaceChildren();
      return askForToken(again);
    }
    const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; reader && !(part = await reader.read()).done;) output.textContent += part.value;
    note.textContent = `${answer.status} ${answer.statusText} in ${((performance.now() - began) / 1000).toFixed(2)} s`;
    if (!answer.headers.get("content-type")?.includes("json")) return;
    const value = JSON.parse(output.textContent);
    output.textContent = JSON.stringify(value, null, 2);
    if (answer.ok) onValue(value);
  } catch (error) {
    note.textContent = error instanceof TypeError ? "The router does not respond." : error.message;
  }
}

async function show() {
  const status = document.getElementById("status");
  const answer = await fetch("/openapi.json", { headers: authorized() }).catch(() => null);
  if (answer?.status === 401) return askForToken(show);
  status.hidden = answer?.ok ?? false;
  if (!answer?.ok) {
    status.textContent = answer ? `openapi.json: the router responded with status ${answer.status}` : "The router does not respond.";
    return;
  }
  // JSON.parse would round integers beyond 2^53.
  const { tags, paths, components } = JSON.parse((await answer.text()).replace(/:\s*(-?\d{16,})(?=[,}\]])/g, ':"$1"'));
  const groups = tags.map(({ name, description }) => {
    const id = name.toLowerCase().replaceAll(" ", "-");
    const section = element("section", "", element("h2", name), words("p", description));
    section.id = id;
    for (const [path, methods] of Object.entries(paths)) {
      const parameter = Object.keys(paths).map((other) => other.startsWith(`${path}/{`) && other.match(/\{(\w+)\}$/)?.[1]).find(Boolean);
      for (const [method, operation] of Object.entries(methods)) {
        if (operation.tags[0] !== name) continue;
        section.append(describe(path, method, operation, components.schemas, method === "post" ? parameter : undefined));
      }
    }
    return section;
  });
  document.getElementById("groups").replaceChildren(...groups);
  document.getElementById("contents").replaceChildren(...groups.map((section) => {
    const link = element("a", section.querySelector("h2").textContent);
    link.href = `#${section.id}`;
    return element("li", "", link);
  }));
}

show();
