// The bearer token of this tab; the dashboard uses the same one.
const KEY = "midstream-token";

export function authorized(headers = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}

/** Show the form that asks for a token; `then` is called once one is entered. */
export function askForToken(then) {
  const door = document.getElementById("door");
  const input = document.getElementById("token");
  door.hidden = false;
  input.focus();
  door.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    input.value = "";
    door.hidden = true;
    then();
  };
}
