// Watches the server: asks several times in two seconds whether it is ready, and for its model when it became ready.

import { askForNewKey, key, pause, request, ServerError } from "./api.js";

const CHOSEN = "auraflux.model";
const EVERY_S = 0.7;
const TIMEOUT_MS = 1000;

export class Server {
  // `changed` is called when the state or the model changed. States: loading, ready, locked (it wants a key), away.
  constructor(changed) {
    this.changed = changed;
    this.state = "loading";
    this.text = "Connecting";
    this.model = null;
    this.models = [];
    this.refused = null;
    this.wake = () => {};
    this.first = new Promise((resolve) => (this.resolve = resolve));
  }

  // A promise of the model, which resolves once the server has told of one.
  get found() {
    return this.model ? Promise.resolve(this.model) : this.first;
  }

  // Watch for as long as the page is open; not while it is hidden.
  async watch() {
    for (const event of ["online", "offline", "focus"]) addEventListener(event, () => this.wake());
    document.addEventListener("visibilitychange", () => this.wake());
    for (;;) {
      if (!document.hidden) await this.check();
      await Promise.race([pause(EVERY_S), new Promise((resolve) => (this.wake = resolve))]);
    }
  }

  async check() {
    const [state, text] = await probe();
    if (state !== "ready") this.set(state, text);
    else if (this.state !== "ready" && (this.refused === null || this.refused !== key())) await this.describe();
  }

  // Ask for the model, and for a key if the server wants one.
  async describe() {
    try {
      const response = await request("v1/models", { ask: false, onwait: (why) => this.set("loading", why) });
      this.models = (await response.json()).data ?? [];
      this.model = this.models.find((one) => one.id === chosenModel()) ?? this.models[0] ?? null;
      this.refused = null;
      if (!this.model) return this.set("loading", "The server has no model");
      this.resolve(this.model);
      return this.set("ready", this.model.id);
    } catch (error) {
      if (!(error instanceof ServerError && error.status === 401)) return this.set("away", error.message);
      this.set("locked", "API key needed");
      // not tried again with the same key
      this.refused = key();
      return void this.unlock();
    }
  }

  // Answer with another of the server's models from now on.
  choose(id) {
    const found = this.models.find((one) => one.id === id);
    if (!found) return;
    localStorage.setItem(CHOSEN, id);
    this.model = found;
    this.text = found.id;
    this.changed(this);
  }

  // Ask the user for a key, and try it.
  async unlock() {
    if (!(await askForNewKey(this.refused ?? ""))) return;
    this.refused = null;
    this.wake();
  }

  set(state, text) {
    if (state === this.state && text === this.text) return;
    this.state = state;
    this.text = text;
    this.changed(this);
  }
}

const chosenModel = () => localStorage.getItem(CHOSEN);

// Return the state of the server without its model.
async function probe() {
  try {
    const response = await fetch("ready", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status !== 503) return ["ready", ""];
    const { error } = await response.json();
    return /loading|loaded/.test(error.message) ? ["loading", "The model is loading"] : ["away", error.message.replace(/\.$/, "")];
  } catch {
    return ["away", "The server does not answer"];
  }
}
