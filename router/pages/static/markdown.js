// Markdown of answers as nodes. HTML in it is shown as text, and images as links, since answers are not trusted.
import DOMPurify from "/static/vendor/dompurify.js";
import { Marked } from "/static/vendor/marked.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong", "table", "tbody",
  "td", "th", "thead", "tr", "ul",
];
const RULES = {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["class", "href", "start"], ALLOW_ARIA_ATTR: false, ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true,
};
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => ENTITIES[character]);
}

const parser = new Marked({
  breaks: true,
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const tag = `h${Math.min(depth + 2, 6)}`; // the page has h1 and h2
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
});

/** Return the nodes of a text; code blocks have their language in `data-language`. */
export function markdown(text) {
  const nodes = DOMPurify.sanitize(parser.parse(text), RULES);
  for (const link of nodes.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const pre of nodes.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    pre.dataset.language = /^language-([\w+#.-]+)$/.exec(code?.className ?? "")?.[1] ?? "";
    pre.tabIndex = 0; // wide code is scrolled with the keyboard
  }
  for (const item of nodes.querySelectorAll("[class]")) item.removeAttribute("class");
  return nodes;
}
