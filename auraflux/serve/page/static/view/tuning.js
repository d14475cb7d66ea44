// The dialog with the settings of one conversation: system prompt and sampling. Empty fields show the server's defaults.

import { all, applied, matching, remove, save } from "../chat/presets.js";
import { defaultText, isChanged, readSettings, SAMPLERS } from "../chat/sampling.js";
import { byId } from "./dom.js";
import { announce } from "./notice.js";
import { closable } from "./settings.js";

export class Tuning {
  // `change` gets the new settings of the conversation; `keep` makes them those of new conversations.
  constructor(change, keep) {
    this.change = change;
    this.settings = readSettings(null);
    this.dialog = byId("tuning");
    this.button = byId("open-tuning");
    this.button.addEventListener("click", () => this.dialog.showModal());
    closable(this.dialog);
    this.dialog.addEventListener("input", (event) => event.target.closest("#presets") || this.take());
    // numbers outside their limits were moved to them
    this.dialog.addEventListener("change", () => this.fill());
    byId("tuning-reset").addEventListener("click", () => this.reset());
    byId("tuning-keep").addEventListener("click", () => {
      keep(this.settings);
      this.say("New conversations begin with these settings.");
    });
    this.dialog.addEventListener("close", () => this.say(""));
    byId("preset").addEventListener("change", () => this.apply(byId("preset").value));
    byId("preset-save").addEventListener("click", () => this.savePreset());
    byId("preset-remove").addEventListener("click", () => this.removePreset());
    byId("preset-name").addEventListener("keydown", (event) => event.key === "Enter" && this.savePreset());
  }

  apply(name) {
    const preset = all().find((one) => one.name === name);
    if (!preset) return;
    this.settings = applied(this.settings, preset);
    this.fill();
    this.mark();
    this.change(this.settings);
  }

  savePreset() {
    const field = byId("preset-name");
    const name = field.value.trim();
    if (!name) return field.focus();
    const saved = save(name, this.settings);
    if (saved) field.value = "";
    this.mark();
    this.say(saved ? `Saved as “${name}”.` : `“${name}” is built in: choose another name.`);
  }

  removePreset() {
    const { value } = byId("preset");
    remove(value);
    this.mark();
    this.say(`“${value}” was deleted.`);
  }

  // Show the settings of a conversation, with the defaults of `model`.
  show(settings, model) {
    this.settings = settings;
    for (const name of SAMPLERS) byId(`set-${name}`).placeholder = defaultText(model, name);
    const source = model?.default_sampling?.source;
    const origin = source && source !== "default" ? ` (${source})` : "";
    byId("tuning-source").textContent = `Empty fields use the server's defaults${origin}.`;
    if (!this.dialog.open) this.fill();
    this.mark();
  }

  fill() {
    for (const name of ["system", ...SAMPLERS]) byId(`set-${name}`).value = this.settings[name] ?? "";
  }

  take() {
    const given = Object.fromEntries(["system", ...SAMPLERS].map((name) => [name, byId(`set-${name}`).value]));
    this.settings = readSettings(given);
    this.say("");
    this.mark();
    this.change(this.settings);
  }

  reset() {
    for (const name of ["system", ...SAMPLERS]) byId(`set-${name}`).value = "";
    this.take();
    this.say("All fields use the defaults again.");
  }

  mark() {
    const changed = isChanged(this.settings);
    this.button.classList.toggle("changed", changed);
    byId("tuning-reset").disabled = !changed;
    const found = matching(this.settings);
    const options = all().map(({ name }) => new Option(name, name, false, name === found?.name));
    byId("preset").replaceChildren(...(found ? [] : [new Option("Own settings", "", false, true)]), ...options);
    byId("preset-remove").hidden = !found || found.builtIn;
  }

  say(text) {
    byId("tuning-done").textContent = text;
    if (text) announce(text);
  }
}
