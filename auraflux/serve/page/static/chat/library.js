// Holds all conversations in memory and writes changes to the store.

import { note } from "../view/notice.js";
import * as store from "./store.js";

const SAVE_EVERY_MS = 1500;

export class Library {
  constructor() {
    this.conversations = [];
    this.timers = new Map();
  }

  // Load the stored conversations. Those started in the meantime stay.
  async load() {
    let stored = [];
    try {
      stored = await store.all();
    } catch {
      note("This browser stores no data for this page; conversations are lost when it closes.");
    }
    // the page was closed while this answer was generated
    for (const { messages } of stored) for (const message of messages) if (message.state === "writing") message.state = "stopped";
    this.conversations = [...stored, ...this.conversations];
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

  // Write it soon; many calls make one write.
  saveSoon(conversation) {
    if (this.timers.has(conversation.id)) return;
    this.timers.set(conversation.id, setTimeout(() => this.save(conversation), SAVE_EVERY_MS));
  }

  // Write all pending conversations at once.
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
