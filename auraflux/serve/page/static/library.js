// All conversations: in memory while the page is open, written through to the store.

import { note } from "./notice.js";
import * as store from "./store.js";

const SAVE_EVERY_MS = 1500;

export class Library {
  constructor() {
    this.conversations = [];
    this.timers = new Map();
  }

  // What was begun while the store was read stays.
  async load() {
    let kept = [];
    try {
      kept = await store.all();
    } catch {
      note("This browser keeps no data for this page; conversations end with it.");
    }
    // an answer whose page was closed is as far as it came
    for (const { messages } of kept) for (const message of messages) if (message.state === "writing") message.state = "stopped";
    this.conversations = [...kept, ...this.conversations];
  }

  add(conversation) {
    this.conversations.push(conversation);
  }

  has(conversation) {
    return this.conversations.includes(conversation);
  }

  // Write a conversation to the store now.
  async save(conversation) {
    clearTimeout(this.timers.get(conversation.id));
    this.timers.delete(conversation.id);
    if (!this.has(conversation) || !conversation.messages.length) return;
    try {
      await store.put(conversation);
    } catch {
      note("The conversation could not be saved in this browser.");
    }
  }

  // Write it before long; many calls make one write.
  saveSoon(conversation) {
    if (this.timers.has(conversation.id)) return;
    this.timers.set(conversation.id, setTimeout(() => this.save(conversation), SAVE_EVERY_MS));
  }

  // Write at once all that waits to be written.
  flush() {
    for (const one of this.conversations) if (this.timers.has(one.id)) this.save(one);
  }

  remove(conversation) {
    clearTimeout(this.timers.get(conversation.id));
    this.timers.delete(conversation.id);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    store.remove(conversation.id).catch(() => {});
  }
}
