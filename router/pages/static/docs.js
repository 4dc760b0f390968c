import { askForToken, authorized } from "/static/token.js";

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map(typeOf).filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") return `[${typeOf(schema.items)}]`;
  const low = schema.minimum ?? schema.exclusiveMinimum, high = schema.maximum ?? schema.exclusiveMaximum;
  return low === undefined && high === undefined ? String(schema.type ?? "any") : `${schema.type} ${low ?? ""}..${high ?? ""}`;
}

function fields(schema, schemas) {
  const resolved = schema?.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
  if (!resolved?.properties) return "";
  const table = element("table");
  const required = new Set(resolved.required ?? []);
  for (const [name, field] of Object.entries(resolved.properties)) {
    table.append(element("tr", "", element("td", name + (required.has(name) ? " *" : "")), element("td", typeOf(field))));
  }
  return table;
}

function describe(path, method, operation, schemas) {
  const box = element("details", "", element("summary", `${method.toUpperCase()} ${path}`));
  box.className = "card";
  box.append(element("p", operation.summary ?? operation.description ?? ""));
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) {
    const example = `curl ${location.origin}${path} -H 'content-type: application/json' -d '{...}'`;
    box.append(element("pre", example), fields(body, schemas));
  } else {
    box.append(element("pre", `curl ${location.origin}${path}`));
  }
  return box;
}

async function show() {
  const answer = await fetch("/openapi.json", { headers: authorized() });
  if (answer.status === 401) return askForToken(show);
  const status = document.getElementById("status");
  if (!answer.ok) {
    status.hidden = false;
    status.textContent = `openapi.json: ${answer.status}`;
    return;
  }
  const { paths, components } = await answer.json();
  const boxes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => describe(path, method, operation, components?.schemas ?? {})));
  document.getElementById("paths").replaceChildren(...boxes);
}

show();
