// Shows the current branch of a conversation, and updates a growing answer at most once per frame.

import { arrange, el } from "./dom.js";
import { messageView } from "./message.js";
import { branch, siblings } from "../chat/tree.js";

export class View {
  constructor(list, follow, act) {
    this.list = list;
    this.follow = follow;
    this.act = act;
    this.views = new Map();
    this.conversation = null;
    this.dirty = new Set();
    this.scheduled = false;
  }

  // Show a conversation, or update the one on screen.
  show(conversation) {
    if (conversation !== this.conversation) this.views.clear();
    this.conversation = conversation;
    const messages = branch(conversation);
    const shown = messages.map((message) => this.viewOf(message));
    messages.forEach((message, at) => shown[at].setVersions(siblings(conversation, message)));
    arrange(this.list, shown.map((view) => view.element));
    this.dropRemoved();
  }

  // Edit the last question on screen.
  editLast() {
    const question = branch(this.conversation).findLast((message) => message.role === "user");
    if (question) this.viewOf(question).edit();
  }

  viewOf(message) {
    if (!this.views.has(message.id)) this.views.set(message.id, messageView(message, this.act));
    return this.views.get(message.id);
  }

  dropRemoved() {
    const ids = new Set(this.conversation.messages.map((message) => message.id));
    for (const id of this.views.keys()) if (!ids.has(id)) this.views.delete(id);
  }

  // Schedule an update of a message. The pause between updates grows with the time an update takes.
  touch(message) {
    this.dirty.add(message.id);
    if (this.scheduled) return;
    this.scheduled = true;
    setTimeout(() => requestAnimationFrame(() => this.draw()), this.pause_ms ?? 0);
  }

  draw() {
    const began = performance.now();
    this.scheduled = false;
    for (const id of this.dirty) this.views.get(id)?.update();
    this.dirty.clear();
    this.follow.grown();
    this.pause_ms = Math.min(3 * (performance.now() - began), 400);
  }
}

// Return the content of an empty conversation.
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
