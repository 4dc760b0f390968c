// Buttons that copy text.

/** Return a button that copies what `text()` returns, and says whether it did. */
export function copyButton(label, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const isDone = await copy(text());
    button.textContent = isDone ? "Copied" : "Not copied";
    button.setAttribute("aria-label", isDone ? "Copied" : "Not copied: the browser refused");
    setTimeout(() => {
      button.textContent = "Copy";
      button.setAttribute("aria-label", label);
    }, 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text); // browsers have no clipboard for pages over HTTP from another machine
  }
}

function copySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "offscreen";
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isDone;
}
