// Numbers as people read them.

export const count = (value) => Number(value).toLocaleString("en");

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %` : "–");

export function rate(value) {
  return value >= 100 ? count(Math.round(value)) : value.toFixed(value >= 10 || value === 0 ? 0 : 1);
}

export function milliseconds(value) {
  if (value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 0 : 1)} s`;
  return `${value.toFixed(value >= 10 || value === 0 ? 0 : 1)} ms`;
}
