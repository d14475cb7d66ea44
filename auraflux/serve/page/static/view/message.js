// Views of one message: a question in a bubble, or an answer with its reasoning, text and statistics.

import { copyFrom } from "./clipboard.js";
import { el, icon, iconButton } from "./dom.js";
import { fileList } from "./attachments.js";
import { figureParts, seconds } from "./figures.js";
import { Rendering } from "../markdown/render.js";

const ENDINGS = {
  stopped: "Stopped.",
  length: "Stopped at the token limit.",
  full: "The model's context is full. Edit an earlier message, or start a new conversation.",
};

// Create the view of a message. `act` has the actions of its buttons: edit, retry, resume, remove, choose.
export function messageView(message, act) {
  return message.role === "user" ? new Question(message, act) : new Reply(message, act);
}

// for screen readers, which go from heading to heading
const heading = (text) => el("h2", { className: "visually-hidden" }, text);

class Question {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.text = el("div", { className: "bubble" }, message.content);
    this.versions = el("span", { className: "versions" });
    const copying = iconButton("copy", "Copy message", () => copyFrom(copying, message.content));
    const editing = iconButton("edit", "Edit and send again", () => this.edit());
    const removing = iconButton("trash", "Delete from here on", () => act.remove(message));
    const altering = el("span", { className: "altering" }, editing, removing);
    this.actions = el("div", { className: "actions" }, this.versions, copying, altering);
    this.files = message.files?.length ? fileList(message.files) : null;
    this.text.hidden = !message.content;
    this.heading = heading("You");
    this.element = el("article", { className: "message question", ariaLabel: "You" });
    this.showText();
  }

  update() {}

  setVersions(others) {
    showVersions(this.versions, this.message, others, this.act);
  }

  showText() {
    this.element.replaceChildren(...[this.heading, this.files, this.text, this.actions].filter(Boolean));
  }

  edit() {
    const area = el("textarea", { className: "editing", value: this.message.content, ariaLabel: "Edit your message" });
    const back = () => this.showText();
    const send = () => {
      if (area.value.trim() && this.act.edit(this.message, area.value.trim())) back();
    };
    area.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        back();
      }
    };
    const cancel = el("button", { type: "button", className: "button", onclick: back }, "Cancel");
    const accept = el("button", { type: "button", className: "button primary", onclick: send }, "Send");
    const editor = el("div", { className: "editor" }, area, el("div", { className: "editor-row" }, cancel, accept));
    this.element.replaceChildren(...[this.heading, this.files, editor].filter(Boolean));
    area.style.height = `${Math.min(area.scrollHeight + 2, 360)}px`;
    area.focus();
    this.element.scrollIntoView({ block: "nearest" });
  }
}

class Reply {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.thoughts = null;
    this.body = el("div", { className: "prose" });
    this.rendering = new Rendering(this.body);
    this.waiting = el("p", { className: "waiting" });
    this.problem = el("div", { className: "problem" });
    this.versions = el("span", { className: "versions" });
    this.figures = el("dl", { className: "figures" });
    this.copying = iconButton("copy", "Copy answer", () => copyFrom(this.copying, message.content));
    this.retrying = iconButton("retry", "Answer again", () => act.retry(message));
    const removing = iconButton("trash", "Delete answer", () => act.remove(message));
    const altering = el("span", { className: "altering" }, this.retrying, removing);
    const actions = el("div", { className: "actions" }, this.versions, this.copying, altering);
    this.foot = el("footer", {}, this.figures, actions);
    const parts = [heading("Answer"), this.body, this.waiting, this.problem, this.foot];
    this.element = el("article", { className: "message reply", ariaLabel: "Answer" }, ...parts);
    this.update();
  }

  update() {
    const { message } = this;
    const writing = message.state === "writing";
    if (message.reasoning) this.showThoughts(writing);
    this.rendering.update(message.content);
    this.element.classList.toggle("writing", writing);
    this.element.ariaBusy = String(writing);
    this.waiting.hidden = !writing || Boolean(message.content || message.reasoning);
    this.waiting.textContent = message.waiting ? `${message.waiting}; trying again` : "Processing the prompt";
    this.foot.hidden = writing;
    this.problem.hidden = writing || !(message.state in ENDINGS || message.state === "failed");
    if (!writing) this.finish();
  }

  finish() {
    const { message } = this;
    this.showProblem();
    this.copying.hidden = !message.content;
    // a failure shows its own retry button
    this.retrying.hidden = message.state === "failed";
    const parts = figureParts(message.figures);
    this.figures.replaceChildren(...parts.map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, text))));
  }

  // Say how the answer ended, if not by itself, with what can be done about it.
  showProblem() {
    const { message, act } = this;
    const failed = message.state === "failed";
    const button = (label, run) => el("button", { type: "button", className: "text-button", onclick: () => run(message) }, label);
    this.problem.className = failed ? "problem failed" : "problem";
    this.problem.replaceChildren(el("span", {}, failed ? message.problem : (ENDINGS[message.state] ?? "")));
    if (!["done", "full"].includes(message.state) && (message.content || message.reasoning)) {
      const resuming = button("Continue", act.resume);
      resuming.classList.add("resume");
      this.problem.append(resuming);
    }
    if (failed) this.problem.append(button("Try again", act.retry));
  }

  showThoughts(writing) {
    const { message } = this;
    this.thoughts ??= this.makeThoughts();
    const { summary, text, began } = this.thoughts;
    // one growing text node, so the browser lays out only the new text
    if (text.length > message.reasoning.length) text.data = message.reasoning;
    else text.appendData(message.reasoning.slice(text.length));
    const busy = writing && message.reasoning_s === undefined;
    const took = message.reasoning_s;
    summary.textContent = busy ? `Thinking · ${seconds((performance.now() - began) / 1000)}` : thought(took);
    this.element.classList.toggle("thinking", busy);
  }

  makeThoughts() {
    const summary = el("span");
    const text = document.createTextNode("");
    const title = el("summary", {}, icon("spark"), summary, icon("chevron"));
    this.body.before(el("details", { className: "thoughts" }, title, el("div", { className: "thought-text" }, text)));
    return { summary, text, began: performance.now() };
  }

  setVersions(others) {
    showVersions(this.versions, this.message, others, this.act);
  }
}

const thought = (took) => (took === undefined ? "Thoughts" : `Thought for ${seconds(took)}`);

// Show the position among several versions, with buttons to the others.
function showVersions(box, message, others, act) {
  const at = others.indexOf(message);
  if (others.length < 2) {
    box.replaceChildren();
    return;
  }
  const before = iconButton("left", "Earlier version", () => act.choose(others[at - 1]));
  const after = iconButton("right", "Later version", () => act.choose(others[at + 1]));
  before.disabled = at === 0;
  after.disabled = at === others.length - 1;
  box.replaceChildren(before, el("span", { ariaLabel: `Version ${at + 1} of ${others.length}` }, `${at + 1}/${others.length}`), after);
}
