// Shows the branch of a conversation that is open, and draws a growing answer at most once a frame.

import { arrange, el } from "./dom.js";
import { messageView } from "./message.js";
import { branch, siblings } from "./tree.js";

export class View {
  constructor(list, follow, act) {
    this.list = list;
    this.follow = follow;
    this.act = act;
    this.views = new Map();
    this.conversation = null;
    this.dirty = new Set();
    this.asked = false;
  }

  // Show a conversation, or what changed in the one that is shown.
  show(conversation) {
    if (conversation !== this.conversation) this.views.clear();
    this.conversation = conversation;
    const messages = branch(conversation);
    const shown = messages.map((message) => this.viewOf(message));
    messages.forEach((message, at) => shown[at].setTurns(siblings(conversation, message)));
    arrange(this.list, shown.map((view) => view.element));
    this.forgetOthers();
  }

  viewOf(message) {
    if (!this.views.has(message.id)) this.views.set(message.id, messageView(message, this.act));
    return this.views.get(message.id);
  }

  forgetOthers() {
    const kept = new Set(this.conversation.messages.map((message) => message.id));
    for (const id of this.views.keys()) if (!kept.has(id)) this.views.delete(id);
  }

  // Draw a message again soon; the longer drawing takes, the longer the pause before the next.
  touch(message) {
    this.dirty.add(message.id);
    if (this.asked) return;
    this.asked = true;
    setTimeout(() => requestAnimationFrame(() => this.draw()), this.pause_ms ?? 0);
  }

  draw() {
    const began = performance.now();
    this.asked = false;
    for (const id of this.dirty) this.views.get(id)?.update();
    this.dirty.clear();
    this.follow.grown();
    this.pause_ms = Math.min(3 * (performance.now() - began), 400);
  }
}

// What an empty conversation shows.
export function welcome(model, suggestions, use) {
  const facts = [];
  if (model?.max_model_len) facts.push(`${model.max_model_len.toLocaleString("en")} tokens of context`);
  if (model?.kv) facts.push(`${model.kv} cache`);
  const buttons = suggestions.map((text) => el("button", { type: "button", className: "suggestion", onclick: () => use(text) }, text));
  return [
    el("h2", {}, "What would you like to know?"),
    el("p", {}, model?.id ?? "", el("br"), facts.join(" · ")),
    el("div", { className: "suggestions" }, ...buttons),
  ];
}
