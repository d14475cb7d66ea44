// The message field. Enter sends, Shift-Enter breaks the line, the arrow up edits the last question, and the button stops a
// running answer.

import { byId, relabel } from "./dom.js";

const MAX_HEIGHT_PX = 240;

export class Composer {
  // `send` gets the text and the files and returns whether it took them.
  constructor(attachments, { send, stop, editLast }) {
    this.attachments = attachments;
    this.editLast = editLast;
    this.field = byId("question");
    this.button = byId("send");
    this.send = send;
    this.stop = stop;
    this.busy = false;
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.button.addEventListener("click", () => (this.busy ? this.stop() : this.submit()));
    this.fit();
  }

  key(event) {
    // Enter also confirms input-method suggestions
    if (event.isComposing || event.shiftKey) return;
    if (event.key === "ArrowUp" && !this.field.value && !this.busy) this.editLast();
    else if (event.key === "Enter") this.submit();
    else return;
    event.preventDefault();
  }

  submit() {
    const text = this.field.value.trim();
    const { files } = this.attachments;
    if ((!text && !files.length) || this.busy || !this.send(text, files)) return;
    this.attachments.clear();
    this.set("");
  }

  set(text) {
    this.field.value = text;
    this.fit();
    this.field.focus();
  }

  setBusy(busy) {
    if (busy !== this.busy) {
      this.busy = busy;
      relabel(this.button, busy ? "stop" : "send", busy ? "Stop (Esc)" : "Send (Enter)");
    }
    this.fit();
  }

  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, MAX_HEIGHT_PX)}px`;
    this.button.disabled = !this.busy && !this.field.value.trim() && !this.attachments.files.length;
  }
}
