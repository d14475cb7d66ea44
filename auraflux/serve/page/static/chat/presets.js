// Presets: named samplings, a few built in and those that the user saved. They are stored in the browser.

import { LIMITS, readSettings, SAMPLERS } from "./sampling.js";

const STORAGE_KEY = "auraflux.presets";
const OFF = Object.fromEntries(SAMPLERS.map((name) => [name, null]));

const BUILT_IN = [
  ["The model's defaults", {}],
  ["Exact", { temperature: 0 }],
  ["Balanced", { temperature: 0.7, top_p: 0.9 }],
  ["Inventive", { temperature: 1.1, min_p: 0.05 }],
].map(([name, given]) => ({ name, builtIn: true, system: null, sampling: { ...OFF, ...given } }));

function samplingOf(settings) {
  return Object.fromEntries(SAMPLERS.map((name) => [name, settings[name]]));
}

function load() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORAGE_KEY));
    if (!Array.isArray(stored)) return [];
    return stored.filter((one) => typeof one?.name === "string").map(({ name, settings }) => preset(name, readSettings(settings)));
  } catch {
    return [];
  }
}

function preset(name, settings) {
  return { name, builtIn: false, system: settings.system, sampling: samplingOf(settings) };
}

function store(presets) {
  const kept = presets.map(({ name, system, sampling }) => ({ name, settings: { system, ...sampling } }));
  localStorage.setItem(STORAGE_KEY, JSON.stringify(kept));
}

export const all = () => [...BUILT_IN, ...load()];

// Save settings as a preset, in place of a saved one of that name. Return false for the name of a built-in one.
export function save(name, settings) {
  if (BUILT_IN.some((one) => one.name === name)) return false;
  store([...load().filter((one) => one.name !== name), preset(name, settings)]);
  return true;
}

export function remove(name) {
  store(load().filter((one) => one.name !== name));
}

// Return settings with those of a preset; built-in ones leave the system prompt, the seed and limits as they are.
export function applied(settings, { builtIn, system, sampling }) {
  if (builtIn) {
    const kept = Object.fromEntries(["seed", ...LIMITS].map((name) => [name, settings[name]]));
    return { ...settings, ...sampling, ...kept };
  }
  return { ...settings, ...sampling, system };
}

// Return the preset that gives these settings; undefined for none.
export function matching(settings) {
  const text = JSON.stringify(settings, Object.keys(settings).sort());
  return all().findLast((one) => JSON.stringify(applied(settings, one), Object.keys(settings).sort()) === text);
}
