// One card for each worker group, with its rows, its speed, and a map of its KV blocks.

import { byId, element } from "./dom.js";
import { count, percent, rate } from "./text.js";

const GAP = 1;
const cards = new Map();

export function showGroups(groups) {
  byId("no-groups").hidden = groups.length > 0;
  const names = new Set(groups.map((group) => group.groupId));
  for (const [name, card] of cards) {
    if (!names.has(name)) {
      card.node.remove();
      cards.delete(name);
    }
  }
  for (const group of groups) {
    if (!cards.has(group.groupId)) cards.set(group.groupId, new Card(group.groupId));
    cards.get(group.groupId).show(group);
  }
}

export function redrawGroups() {
  for (const card of cards.values()) card.draw();
}

class Card {
  constructor(name) {
    this.about = element("p", { class: "muted" });
    this.canvas = element("canvas", { role: "img" });
    this.facts = element("dl");
    this.node = element("article", { class: "group" }, element("h3", {}, name), this.about, this.canvas, this.facts);
    byId("groups").append(this.node);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(group) {
    this.group = group;
    const role = ["prefill", "decode"].includes(group.role) ? `${group.role} · ` : "";
    const ranks = group.worldSize > 1 ? `, ${group.worldSize} ranks` : "";
    const perCell = group.blockMap.blocksPerCell;
    const cells = perCell > 1 ? `a cell is ${perCell} blocks` : "a cell is a block";
    this.about.textContent =
      `${role}${group.device} ${group.dtype}${ranks} · ${count(group.numBlocks)} blocks of ${group.tokensPerBlock} tokens, ${cells}`;
    const free = group.numBlocks - group.numHeldBlocks - group.numCachedBlocks;
    const facts = {
      sequences: `${group.numSequences} of ${group.maxNumSequences}`,
      "steps/s": rate(group.stepsPerS),
      held: `${count(group.numHeldBlocks)} (${percent(group.numHeldBlocks / group.numBlocks)})`,
      shared: count(group.numSharedBlocks),
      cached: count(group.numCachedBlocks),
      free: count(free),
      ...(Number(group.numStoredBlocks) ? { "in tiers": count(group.numStoredBlocks) } : {}),
    };
    this.facts.replaceChildren(...Object.entries(facts).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    const spoken = Object.entries(facts).map(([name, value]) => `${name} ${value}`).join(", ");
    this.canvas.setAttribute("aria-label", `Map of KV blocks: ${spoken}`);
    this.draw();
  }

  draw() {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (!width || !this.group) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const [free, held, shared, cached] = ["--track", "--a", "--c", "--cached"].map((name) => style.getPropertyValue(name));
    const map = this.group.blockMap;
    const size = cellSize(map.held.length, width, height);
    const perRow = Math.floor(width / size);
    for (let cell = 0; cell < map.held.length; cell += 1) {
      const x = (cell % perRow) * size;
      const y = Math.floor(cell / perRow) * size;
      const side = size - GAP;
      const blocks = Math.min(map.blocksPerCell, this.group.numBlocks - cell * map.blocksPerCell);
      context.fillStyle = free;
      context.fillRect(x, y, side, side);
      // From the bottom up: shared, held, cached. Every non-zero number is visible, however small it is.
      let level = y + side;
      for (const [number, colour] of [[map.shared[cell], shared], [map.held[cell], held], [map.cached[cell], cached]]) {
        if (!number) continue;
        const part = Math.min(Math.max(side * number / blocks, 1.5), level - y);
        context.fillStyle = colour;
        context.fillRect(x, level - part, side, part);
        level -= part;
      }
    }
  }
}

/** Returns the largest size at which all cells fit. */
function cellSize(number, width, height) {
  let size = Math.floor(Math.sqrt(width * height / number));
  while (size > 2 && Math.ceil(number / Math.floor(width / size)) * size > height) size -= 1;
  return Math.max(2, Math.min(size, 24));
}
