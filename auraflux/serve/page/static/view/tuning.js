// The dialog with the settings of one conversation: system prompt and sampling. Empty fields show the server's defaults.

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
    this.dialog.addEventListener("input", () => this.take());
    // numbers outside their limits were moved to them
    this.dialog.addEventListener("change", () => this.fill());
    byId("tuning-reset").addEventListener("click", () => this.reset());
    byId("tuning-keep").addEventListener("click", () => {
      keep(this.settings);
      this.say("New conversations begin with these settings.");
    });
    this.dialog.addEventListener("close", () => this.say(""));
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
  }

  say(text) {
    byId("tuning-done").textContent = text;
    if (text) announce(text);
  }
}
