// The settings of the page, stored in the browser, and their dialog: theme, API key, defaults of new conversations.

import { key, setKey } from "../chat/api.js";
import { readSettings } from "../chat/sampling.js";
import { byId } from "./dom.js";
import { count } from "./figures.js";

const STORAGE_KEY = "auraflux.settings";

function load() {
  try {
    return JSON.parse(localStorage.getItem(STORAGE_KEY)) ?? {};
  } catch {
    return {};
  }
}

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

export class Settings {
  constructor() {
    const stored = load();
    this.theme = stored.theme ?? "auto";
    // the settings of new conversations
    this.defaults = readSettings(stored);
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
    closable(this.dialog);
    this.dialog.addEventListener("input", () => this.take());
  }

  open() {
    byId("set-key").value = key();
    for (const radio of document.getElementsByName("theme")) radio.checked = radio.value === this.theme;
    this.dialog.showModal();
  }

  take() {
    this.theme = [...document.getElementsByName("theme")].find((radio) => radio.checked)?.value ?? "auto";
    setKey(byId("set-key").value.trim());
    showTheme(this.theme);
    this.save();
  }

  setDefaults(settings) {
    this.defaults = readSettings(settings);
    this.save();
  }

  save() {
    localStorage.setItem(STORAGE_KEY, JSON.stringify({ ...this.defaults, theme: this.theme }));
  }

  // Show the properties of the model, and a choice where the server has several; `choose` gets the name of another one.
  describe(model, models, choose) {
    const choice = byId("model-choice");
    byId("model-name").textContent = model.id;
    choice.hidden = models.length < 2;
    choice.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === model.id)));
    choice.onchange = () => choose(choice.value);
    byId("model-kv").textContent = model.kv ?? "unknown";
    byId("model-context").textContent = model.max_model_len ? `${count(model.max_model_len)} tokens` : "unknown";
  }
}

// Let a click outside a dialog, and its button with the cross, close it.
export function closable(dialog) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
}
