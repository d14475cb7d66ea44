// Connects the parts of the page: a user action changes a conversation, then the views update.

import { onKeyWanted } from "./chat/api.js";
import { Answer } from "./chat/answer.js";
import { Composer } from "./view/composer.js";
import { byId } from "./view/dom.js";
import { closeDrawer, startDrawer } from "./view/drawer.js";
import { startExchange } from "./chat/exchange.js";
import { Library } from "./chat/library.js";
import { announce, note } from "./view/notice.js";
import { Follow } from "./view/scroll.js";
import { findModel } from "./chat/server.js";
import { askKey, Settings } from "./view/settings.js";
import { Sidebar } from "./view/sidebar.js";
import { append, branch, choose, newConversation, remove, titleFrom } from "./chat/tree.js";
import { View, welcome } from "./view/view.js";

const SUGGESTIONS = [
  "Explain how a key–value cache works",
  "Write a Python function that merges sorted lists",
  "Compare TCP and UDP in a table",
  "Plan a week of simple dinners",
];

class App {
  constructor() {
    this.library = new Library();
    this.settings = new Settings();
    this.follow = new Follow(byId("scroll"), byId("jump"));
    this.answers = new Map();
    this.found = null;
    this.model = null;
    this.current = newConversation();
    this.view = new View(byId("messages"), this.follow, {
      edit: (message, text) => this.ask(text, message.parent),
      retry: (message) => this.retry(message),
      remove: (message) => this.removeMessage(message),
      choose: (message) => this.choose(message),
    });
    this.sidebar = new Sidebar({
      open: (conversation) => this.open(conversation),
      rename: (conversation, title) => this.rename(conversation, title),
      remove: (conversation) => this.removeConversation(conversation),
    });
    this.composer = new Composer((text) => this.ask(text, this.current.leaf), () => this.stop());
  }

  async start() {
    onKeyWanted(askKey);
    startDrawer();
    startExchange(this.library, () => this.show());
    byId("new").addEventListener("click", () => this.open(newConversation()));
    byId("new-here").addEventListener("click", () => this.open(newConversation()));
    addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && this.stop());
    addEventListener("pagehide", () => this.library.flush());
    this.found = findModel();
    await this.library.load();
    this.open(this.current);
    this.model = await this.found;
    this.settings.describe(this.model);
    this.show();
  }

  open(conversation) {
    this.current = conversation;
    closeDrawer();
    this.show();
    this.follow.toEnd();
    // on a phone focus would raise the keyboard over the conversation
    if (matchMedia("(pointer: fine)").matches) this.composer.field.focus();
  }

  show() {
    const { current } = this;
    const empty = !current.messages.length;
    byId("title").textContent = current.title || "New conversation";
    document.title = current.title ? `${current.title} · Auraflux` : "Auraflux";
    byId("welcome").hidden = !empty;
    if (empty) byId("welcome").replaceChildren(...welcome(this.model, SUGGESTIONS, (text) => this.composer.set(text)));
    this.view.show(current);
    this.sidebar.show(this.library.conversations, current, new Set(this.answers.keys()));
    const busy = this.answers.has(current.id);
    this.composer.setBusy(busy);
    byId("messages").classList.toggle("busy", busy);
  }

  // Add a question below `parent` and request an answer. Return false while another answer is being generated.
  ask(text, parent) {
    const { current } = this;
    if (this.answers.has(current.id)) return false;
    if (!this.library.has(current)) this.library.add(current);
    current.title ||= titleFrom(text);
    const question = append(current, parent, { role: "user", content: text });
    this.answer(current, question.id);
    return true;
  }

  retry(message) {
    if (!this.answers.has(this.current.id)) this.answer(this.current, message.parent);
  }

  async answer(conversation, parent) {
    const history = branch(conversation, parent);
    const message = append(conversation, parent, { role: "assistant" });
    const answer = new Answer(message, () => {
      this.view.touch(message);
      this.library.saveSoon(conversation);
    });
    this.answers.set(conversation.id, answer);
    this.show();
    this.follow.toEnd();
    announce("Generating an answer.");
    await answer.run(this.found, this.settings.values, history);
    this.answers.delete(conversation.id);
    conversation.updated = Date.now();
    this.library.save(conversation);
    this.show();
    announce(message.state === "failed" ? message.problem : message.state === "stopped" ? "Stopped." : "The answer is complete.");
  }

  stop() {
    this.answers.get(this.current.id)?.stop();
  }

  choose(message) {
    if (this.answers.has(this.current.id)) return;
    choose(this.current, message);
    this.library.save(this.current);
    this.show();
  }

  rename(conversation, title) {
    conversation.title = title;
    this.library.save(conversation);
    this.show();
  }

  removeMessage(message) {
    const { current } = this;
    if (this.answers.has(current.id)) return;
    const before = { messages: current.messages, leaf: current.leaf };
    remove(current, message);
    this.settle(current);
    const undo = () => {
      Object.assign(current, before);
      this.settle(current);
    };
    note(message.role === "user" ? "Messages deleted." : "Answer deleted.", { label: "Undo", run: undo });
  }

  // a conversation without messages is not stored, but stays open on the page
  settle(conversation) {
    if (!conversation.messages.length) this.library.remove(conversation);
    else if (!this.library.has(conversation)) this.library.add(conversation);
    this.library.save(conversation);
    this.show();
  }

  removeConversation(conversation) {
    this.answers.get(conversation.id)?.stop();
    this.library.remove(conversation);
    if (conversation === this.current) this.open(newConversation());
    else this.show();
    const undo = () => {
      this.library.add(conversation);
      this.library.save(conversation);
      this.open(conversation);
    };
    note("Conversation deleted.", { label: "Undo", run: undo });
  }
}

new App().start();
