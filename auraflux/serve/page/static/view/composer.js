// The message field. Enter sends, Shift-Enter breaks the line, and the button stops a running answer.

import { byId, relabel } from "./dom.js";

const MAX_HEIGHT_PX = 240;

export class Composer {
  constructor(send, stop) {
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
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  submit() {
    const text = this.field.value.trim();
    if (!text || this.busy || !this.send(text)) return;
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
    this.button.disabled = !this.busy && !this.field.value.trim();
  }
}
