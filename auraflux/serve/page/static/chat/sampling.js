// The settings of a conversation: its system prompt and its sampling. A null number means the default of the server.

// name, least and most value, whole numbers only
const NUMBERS = [
  ["temperature", 0, 2],
  ["top_p", 0.01, 1],
  ["top_k", 0, 1_000_000, true],
  ["min_p", 0, 1],
  ["repetition_penalty", 0.01, 10],
  ["presence_penalty", -2, 2],
  ["frequency_penalty", -2, 2],
  ["max_tokens", 1, 10_000_000, true],
  ["max_thinking_tokens", 0, 10_000_000, true],
  ["seed", 0, Number.MAX_SAFE_INTEGER, true],
];

// built-in presets leave them as they are
export const LIMITS = ["max_tokens", "max_thinking_tokens"];
export const SAMPLERS = NUMBERS.map(([name]) => name);

// Return complete settings from stored or imported ones, with numbers within their limits.
export function readSettings(given) {
  const settings = { system: typeof given?.system === "string" ? given.system : "" };
  for (const [name, least, most, whole] of NUMBERS) {
    const value = given?.[name];
    const known = value !== null && value !== undefined && value !== "" && Number.isFinite(Number(value));
    const number = known ? Math.min(Math.max(Number(value), least), most) : null;
    settings[name] = known && whole ? Math.round(number) : number;
  }
  return settings;
}

// Return the fields of a request: only those that were set.
export function samplingFields(settings) {
  return Object.fromEntries(SAMPLERS.filter((name) => settings[name] !== null).map((name) => [name, settings[name]]));
}

// Return whether anything differs from the defaults of the server.
export function isChanged(settings) {
  return Boolean(settings.system.trim()) || SAMPLERS.some((name) => settings[name] !== null);
}

// Return the server's default of a number as text.
export function defaultText(model, name) {
  if (name === "seed") return "random";
  if (LIMITS.includes(name)) return "no limit";
  const defaults = model?.default_sampling;
  if (!defaults) return "default";
  if (Number.isFinite(defaults[name])) return String(defaults[name]);
  return name === "temperature" ? "default" : "off";
}
