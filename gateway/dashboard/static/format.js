// Numbers as people read them. Units are always there; what is unknown is a dash.

export const DASH = "–";

const counts = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? DASH : counts.format(value));
export const short = (value) => (value === null || value === undefined ? DASH : value < 10000 ? counts.format(value) : compact.format(value));
export const percent = (share) => (share === null || share === undefined ? DASH : `${share > 0 && share < 0.1 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`);
export const rate = (value) => (value === null || value === undefined ? DASH : value >= 100 ? counts.format(value) : value.toFixed(1));

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.0095 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.round(value / 60)} min`;
}

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let left = value;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${left >= 100 || unit === 0 ? Math.round(left) : left.toFixed(1)} ${units[unit]}`;
}

export const words = (text) => text.replaceAll("_", " ");
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
