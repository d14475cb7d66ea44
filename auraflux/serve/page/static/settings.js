// What the reader chose, kept in the browser, and the dialog that changes it. Empty numbers leave the choice to the server.

import { key, setKey } from "./api.js";
import { byId } from "./dom.js";

const PLACE = "auraflux.settings";
const USUAL = { system: "", temperature: null, top_p: null, max_tokens: null, theme: "auto" };
const LIMITS = { temperature: [0, 2], top_p: [0, 1], max_tokens: [1, Infinity] };

export function load() {
  try {
    const { system, theme, ...numbers } = JSON.parse(localStorage.getItem(PLACE)) ?? {};
    const kept = { ...USUAL, system: String(system ?? ""), theme: theme ?? "auto" };
    for (const name of Object.keys(LIMITS)) kept[name] = within(name, numbers[name] ?? "");
    return kept;
  } catch {
    return { ...USUAL };
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
    localStorage.setItem(PLACE, JSON.stringify(this.values));
    showTheme(this.values.theme);
  }

  // Show what the server says of its model.
  describe(model) {
    byId("model-name").textContent = model.id;
    byId("model-kv").textContent = model.kv ?? "not told";
    byId("model-context").textContent = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens` : "not told";
  }
}

// Ask for the key that the server wants; gives null when the reader declines.
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
