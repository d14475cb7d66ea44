// Formats the statistics of an answer.

const NUMBER = new Intl.NumberFormat("en");

export const count = (value) => NUMBER.format(value);

export function seconds(value) {
  if (value < 0.095) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function size(nbytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = nbytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 99.5 || unit === 0 ? Math.round(value) : value.toPrecision(value < 9.95 ? 2 : 3)} ${units[unit]}`;
}

// Return the known statistics of an answer as [accessible label, text].
export function figureParts(figures) {
  if (!figures) return [];
  const { tokens_per_s, first_s, prompt_tokens, completion_tokens, cached_tokens, cache_nbytes, plain_nbytes } = figures;
  const parts = [];
  if (tokens_per_s) parts.push(["Speed", `${tokens_per_s.toFixed(tokens_per_s < 100 ? 1 : 0)} tokens/s`]);
  if (first_s !== undefined) parts.push(["Time to first token", `first token ${seconds(first_s)}`]);
  if (completion_tokens) parts.push(["Generated", `${count(completion_tokens)} tokens`]);
  if (prompt_tokens) {
    const cached = cached_tokens === undefined ? "" : `${count(cached_tokens)} of `;
    parts.push(["Prompt", `${cached}${count(prompt_tokens)} prompt tokens${cached && " cached"}`]);
  }
  if (cache_nbytes) {
    const plain = plain_nbytes > cache_nbytes ? ` (${size(plain_nbytes)} uncompressed)` : "";
    parts.push(["Cache", `cache ${size(cache_nbytes)}${plain}`]);
  }
  return parts;
}
