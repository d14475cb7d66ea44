// The user settings, stored in the browser, and their dialog. An empty number means the default of the server.

import { key, setKey } from "../chat/api.js";
import { byId } from "./dom.js";

const STORAGE_KEY = "auraflux.settings";
const DEFAULTS = { system: "", temperature: null, top_p: null, max_tokens: null, theme: "auto" };
const LIMITS = { temperature: [0, 2], top_p: [0, 1], max_tokens: [1, Infinity] };

export function load() {
  try {
    const { system, theme, ...numbers } = JSON.parse(localStorage.getItem(STORAGE_KEY)) ?? {};
    const stored = { ...DEFAULTS, system: String(system ?? ""), theme: theme ?? "auto" };
    for (const name of Object.keys(LIMITS)) stored[name] = within(name, numbers[name] ?? "");
    return stored;
  } catch {
    return { ...DEFAULTS };
  }
}

function within(name, value) {
  if (value === "" || !Number.isFinite(Number(value))) return null;
  const [least, most] = LIMITS[name];
  const number = Math.min(Math.max(Number(value), least), most);
  return name === "max_tokens" ? Math.round(number) : number;
}

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

export class Settings {
  constructor() {
    this.values = load();
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
    byId("close-settings").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("input", () => this.take());
    this.dialog.addEventListener("close", () => this.fill());
  }

  open() {
    this.fill();
    this.dialog.showModal();
  }

  fill() {
    for (const name of ["system", ...Object.keys(LIMITS)]) byId(`set-${name}`).value = this.values[name] ?? "";
    byId("set-key").value = key();
    for (const radio of document.getElementsByName("theme")) radio.checked = radio.value === this.values.theme;
  }

  take() {
    for (const name of Object.keys(LIMITS)) this.values[name] = within(name, byId(`set-${name}`).value);
    this.values.system = byId("set-system").value;
    this.values.theme = [...document.getElementsByName("theme")].find((radio) => radio.checked)?.value ?? "auto";
    setKey(byId("set-key").value.trim());
    localStorage.setItem(STORAGE_KEY, JSON.stringify(this.values));
    showTheme(this.values.theme);
  }

  // Show the properties of the model.
  describe(model) {
    byId("model-name").textContent = model.id;
    byId("model-kv").textContent = model.kv ?? "unknown";
    byId("model-context").textContent = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens` : "unknown";
  }
}

// Ask the user for the API key. Resolve to null if they cancel.
export function askKey(message) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-message").textContent = message;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const end = (value) => {
      dialog.onclose = null;
      dialog.close();
      resolve(value);
    };
    dialog.onclose = () => resolve(null);
    byId("key-cancel").onclick = () => end(null);
    byId("key-accept").onclick = () => end(field.value.trim() || null);
    field.onkeydown = (event) => event.key === "Enter" && end(field.value.trim() || null);
  });
}
