// Formats numbers for display.

export const count = (value) => Number(value).toLocaleString("en");

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %` : "–");

export const rate = (value) => (value >= 100 ? count(Math.round(value)) : short(value));

/** One decimal place for numbers below 10, unless it is 0. */
const short = (value) => value.toFixed(value >= 10 ? 0 : 1).replace(/\.0$/, "");

export function milliseconds(value) {
  if (value === undefined) return "–";
  return value >= 1000 ? `${short(value / 1000)} s` : `${short(value)} ms`;
}
