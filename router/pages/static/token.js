// The API key of this tab, which the pages share.
const KEY = "midstream-token";

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

export function authorized(headers = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}

/** Show the form that asks for a key, and say so if the router refused one; `then` is called once one is entered. */
export function askForToken(then) {
  const isWrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  const form = document.getElementById("door") ?? makeForm();
  const input = form.querySelector("input");
  form.querySelector("#door-error").textContent = isWrong ? "Wrong key: this router does not know it." : "";
  input.setAttribute("aria-invalid", String(isWrong));
  form.hidden = false;
  input.focus();
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    input.value = "";
    form.hidden = true;
    then();
  };
}

function makeForm() {
  const form = document.createElement("form");
  form.id = "door";
  form.className = "notice";
  const label = document.createElement("label");
  label.htmlFor = "token";
  label.textContent = "This router requires an API key. It stays in this tab and is sent only to this router.";
  const input = document.createElement("input");
  Object.assign(input, { id: "token", type: "password", autocomplete: "off", spellcheck: false, required: true });
  input.setAttribute("aria-describedby", "door-error");
  const button = document.createElement("button");
  button.type = "submit";
  button.textContent = "Use this key";
  const error = document.createElement("p");
  error.id = "door-error";
  error.setAttribute("role", "alert");
  form.append(label, input, button, error);
  document.querySelector("main").before(form);
  return form;
}
