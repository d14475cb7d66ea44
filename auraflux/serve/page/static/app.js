// Connects the parts of the page: a user action changes a conversation, then the views update.

import { idOfAddress, onAddress, setAddress } from "./chat/address.js";
import { Answer } from "./chat/answer.js";
import { onKeyWanted } from "./chat/api.js";
import { Attachments } from "./view/attachments.js";
import { Composer } from "./view/composer.js";
import { byId } from "./view/dom.js";
import { closeDrawer, openDrawer, startDrawer } from "./view/drawer.js";
import { startExchange } from "./chat/exchange.js";
import { startKeys } from "./keys.js";
import { askKey } from "./view/key.js";
import { Library } from "./chat/library.js";
import { contextTokens, showMeter } from "./view/meter.js";
import { announce, dismissNote, note } from "./view/notice.js";
import { readSettings } from "./chat/sampling.js";
import { Follow } from "./view/scroll.js";
import { Server } from "./chat/server.js";
import { Settings } from "./view/settings.js";
import { Sidebar } from "./view/sidebar.js";
import { countTokens } from "./chat/tokens.js";
import { append, branch, choose, newConversation, remove, titleFrom } from "./chat/tree.js";
import { Tuning } from "./view/tuning.js";
import { View, welcome } from "./view/view.js";

const NEW_SETTINGS = "auraflux.new";
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
    this.server = new Server(() => this.showServer());
    this.current = newConversation(readSettings(JSON.parse(sessionStorage.getItem(NEW_SETTINGS)) ?? this.settings.defaults));
    this.tuning = new Tuning((settings) => this.tune(settings), (settings) => this.settings.setDefaults(settings));
    this.view = new View(byId("messages"), this.follow, {
      edit: (message, text) => this.ask(text, message.files, message.parent),
      retry: (message) => this.retry(message),
      resume: (message) => this.resume(message),
      remove: (message) => this.removeMessage(message),
      choose: (message) => this.choose(message),
    });
    this.sidebar = new Sidebar({
      open: (conversation) => this.open(conversation),
      rename: (conversation, title) => this.rename(conversation, title),
      remove: (conversation) => this.removeConversation(conversation),
    });
    const count = (text) => countTokens({ model: this.server.model?.id, prompt: text, add_special_tokens: false });
    const takesImages = () => (this.server.model?.input_modalities ?? []).includes("image");
    this.attachments = new Attachments(() => this.showWaiting(), count, takesImages);
    this.composer = new Composer(this.attachments, {
      send: (text, files) => this.ask(text, files, this.current.leaf),
      stop: () => this.stop(),
      editLast: () => this.view.editLast(),
    });
  }

  newConversation() {
    sessionStorage.removeItem(NEW_SETTINGS);
    return newConversation(readSettings(this.settings.defaults));
  }

  async start() {
    onKeyWanted(askKey);
    startDrawer();
    startExchange(this.library, () => this.show());
    for (const id of ["new", "new-here"]) byId(id).addEventListener("click", () => this.open(this.newConversation()));
    startKeys({
      search: () => openDrawer("search"),
      create: () => this.open(this.newConversation()),
      tune: () => byId("open-tuning").click(),
      chooseModel: () => byId("model-choice").focus(),
      write: () => this.composer.field.focus(),
      previous: () => this.openListed(-1),
      next: () => this.openListed(1),
      remove: () => this.library.has(this.current) && this.removeConversation(this.current),
    });
    addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && this.stop());
    addEventListener("pagehide", () => this.library.flush());
    byId("server").addEventListener("click", () => (this.server.state === "locked" ? this.server.unlock() : this.settings.open()));
    this.server.watch();
    const asked = idOfAddress();
    await this.library.load();
    this.open(this.find(asked) ?? this.current, false);
    onAddress((id) => this.open(this.find(id) ?? this.newConversation(), false));
  }

  find(id) {
    return this.library.conversations.find((one) => one.id === id);
  }

  // Show a conversation; `added` makes the browser's back button return to the one before.
  open(conversation, added = true) {
    this.current = conversation;
    conversation.settings ??= readSettings(this.settings.defaults);
    if (added) setAddress(conversation.messages.length ? conversation.id : "", true);
    closeDrawer();
    this.show();
    this.follow.toEnd();
    // on a phone focus would raise the keyboard over the conversation
    if (matchMedia("(pointer: fine)").matches) this.composer.field.focus();
  }

  // Open the conversation so many places further down the list; a new one stands above it.
  openListed(places) {
    const { listed } = this.sidebar;
    const found = listed[listed.indexOf(this.current) + places];
    if (found) this.open(found);
  }

  show() {
    const { current } = this;
    byId("title").textContent = current.title || "New conversation";
    document.title = current.title ? `${current.title} · Auraflux` : "Auraflux";
    setAddress(current.messages.length ? current.id : "");
    this.view.show(current);
    this.sidebar.show(this.library.conversations, current, new Set(this.answers.keys()));
    const busy = this.answers.has(current.id);
    this.composer.setBusy(busy);
    byId("messages").classList.toggle("busy", busy);
    this.showModel();
  }

  showServer() {
    const { state, text, model } = this.server;
    const box = byId("server");
    if (model) this.settings.describe(model, this.server.models, (id) => this.server.choose(id));
    Object.assign(box, { title: text, ariaLabel: `Server: ${text}` });
    box.dataset.state = state;
    byId("server-text").textContent = text;
    this.showModel();
  }

  // Show what depends on the model: the welcome, the defaults of the settings, and its context.
  showModel() {
    const { model } = this.server;
    const empty = !this.current.messages.length;
    byId("welcome").hidden = !empty;
    if (empty) byId("welcome").replaceChildren(...welcome(model, SUGGESTIONS, (text) => this.composer.set(text)));
    this.tuning.show(this.current.settings, model);
    this.showWaiting();
  }

  // Show what the files that wait for a message change: the button, and the context.
  showWaiting() {
    this.composer?.fit();
    showMeter(contextTokens(branch(this.current)), this.attachments.tokens, this.server.model?.max_model_len);
  }

  tune(settings) {
    this.current.settings = settings;
    // those of a conversation without messages outlive a reload too
    if (this.current.messages.length) this.library.saveSoon(this.current);
    else sessionStorage.setItem(NEW_SETTINGS, JSON.stringify(settings));
  }

  // Add a question below `parent` and request an answer. Return false while another answer is being generated.
  ask(text, files, parent) {
    const { current } = this;
    if (this.answers.has(current.id)) return false;
    if (!this.library.has(current)) this.library.add(current);
    sessionStorage.removeItem(NEW_SETTINGS);
    dismissNote();
    current.title ||= titleFrom(text || files[0].name);
    const kept = files?.map(({ name, nbytes, text, image }) => ({ name, nbytes, text, ...(image && { image }) }));
    const question = append(current, parent, { role: "user", content: text, ...(kept?.length && { files: kept }) });
    this.answer(current, question.id);
    return true;
  }

  retry(message) {
    if (!this.answers.has(this.current.id)) this.answer(this.current, message.parent);
  }

  // Continue an unfinished answer where it ended.
  resume(message) {
    if (!this.answers.has(this.current.id)) this.answer(this.current, message.parent, message);
  }

  async answer(conversation, parent, unfinished = null) {
    const history = branch(conversation, parent);
    const message = unfinished ?? append(conversation, parent, { role: "assistant" });
    const answer = new Answer(message, () => {
      this.view.touch(message);
      this.library.saveSoon(conversation);
    });
    this.answers.set(conversation.id, answer);
    this.show();
    this.follow.toEnd();
    announce("Generating an answer.");
    await answer.run(this.server.found, conversation.settings, history);
    this.answers.delete(conversation.id);
    conversation.updated = Date.now();
    this.library.save(conversation);
    this.show();
    announce(message.state === "failed" ? message.problem : message.state === "stopped" ? "Stopped." : "The answer is complete.");
    await answer.recount();
    this.library.save(conversation);
    this.showWaiting();
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
    if (conversation === this.current) this.open(this.newConversation(), false);
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
