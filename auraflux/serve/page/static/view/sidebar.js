// The list of conversations, newest first, grouped by the day of last use, with full-text search.

import { byId, el, iconButton } from "./dom.js";

const DAY_MS = 86_400_000;

export class Sidebar {
  // `act` has the actions on a conversation: open, rename and remove.
  constructor(act) {
    this.act = act;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw());
    this.given = { conversations: [], current: null, busy: new Set() };
    this.listed = [];
  }

  show(conversations, current, busy) {
    this.given = { conversations, current, busy };
    this.draw();
  }

  draw() {
    const words = this.search.value.trim().toLowerCase();
    const found = this.given.conversations.filter((one) => one.messages.length && holds(one, words));
    found.sort((a, b) => b.updated - a.updated);
    this.listed = found;
    const groups = Map.groupBy(found, (one) => dayOf(one.updated));
    const parts = [];
    for (const [day, members] of groups) {
      parts.push(el("h3", {}, day), el("ul", {}, ...members.map((one) => this.row(one))));
    }
    if (!parts.length) parts.push(el("p", { className: "quiet" }, words ? "Nothing found." : "Conversations will be listed here."));
    this.list.replaceChildren(...parts);
  }

  row(conversation) {
    const open = el("button", { type: "button", className: "open", onclick: () => this.act.open(conversation) }, conversation.title);
    if (conversation === this.given.current) open.setAttribute("aria-current", "true");
    const row = el("li", { className: this.given.busy.has(conversation.id) ? "busy" : "" }, open);
    const rename = iconButton("edit", "Rename", () => this.rename(row, conversation));
    row.append(rename, iconButton("trash", "Delete conversation", () => this.act.remove(conversation)));
    return row;
  }

  rename(row, conversation) {
    const field = el("input", { type: "text", value: conversation.title, ariaLabel: "Title", maxLength: 120 });
    let done = false;
    const finish = (title) => {
      if (done) return;
      done = true;
      if (title) this.act.rename(conversation, title);
      else this.draw();
    };
    field.onblur = () => finish(field.value.trim());
    field.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter") finish(field.value.trim());
      if (event.key === "Escape") finish("");
    };
    row.replaceChildren(field);
    field.select();
  }
}

function holds(conversation, words) {
  if (!words) return true;
  const has = (text) => text.toLowerCase().includes(words);
  return has(conversation.title) || conversation.messages.some((message) => has(message.content));
}

function dayOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  return time >= today - 6 * DAY_MS ? "Past week" : "Earlier";
}
