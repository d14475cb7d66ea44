// The files of the message that is being written: picked, dropped or pasted, shown as chips.

import { readFile } from "../chat/files.js";
import { byId, el, icon, iconButton } from "./dom.js";
import { count, size } from "./figures.js";
import { announce, note } from "./notice.js";

export class Attachments {
  // `changed` is called after each change; `measure` resolves to the tokens of a text, or null; `takesImages` tells whether the
  // model does.
  constructor(changed, measure, takesImages) {
    this.changed = changed;
    this.takesImages = takesImages;
    this.measure = measure;
    this.files = [];
    this.box = byId("attachments");
    const chooser = byId("attach-file");
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.add([...chooser.files]);
      chooser.value = "";
    });
    byId("question").addEventListener("paste", (event) => this.paste(event));
    this.startDrop();
  }

  paste(event) {
    const files = [...event.clipboardData.files];
    // a copied table or formatted text also comes as a picture
    if (!files.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    this.add(files);
  }

  startDrop() {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]");
    const show = (over) => (byId("drop").hidden = !over);
    addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      show(true);
    });
    addEventListener("dragleave", (event) => !event.relatedTarget && show(false));
    addEventListener("drop", (event) => {
      show(false);
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(chosen) {
    const problems = [];
    for (const file of chosen) {
      try {
        const read = await readFile(file, this.files, this.takesImages());
        this.files.push(read);
        if (!read.image) this.count(read);
      } catch (error) {
        problems.push(error.name === "NotReadableError" || error.name === "NotFoundError" ? `${file.name} cannot be read.` : error.message);
      }
    }
    this.show();
    if (problems.length) note(problems.join(" "));
    else if (chosen.length) announce(`${chosen.length === 1 ? chosen[0].name : `${chosen.length} files`} added.`);
    byId("question").focus();
  }

  async count(file) {
    file.tokens = await this.measure(file.text);
    if (this.files.includes(file)) this.show();
  }

  clear() {
    this.files = [];
    this.show();
  }

  get tokens() {
    return this.files.reduce((sum, file) => sum + (file.tokens ?? 0), 0);
  }

  show() {
    this.box.replaceChildren(...this.files.map((file) => this.chip(file)));
    this.box.hidden = !this.files.length;
    this.changed();
  }

  chip(file) {
    const remove = () => {
      this.files = this.files.filter((one) => one !== file);
      this.show();
      byId("question").focus();
    };
    const about = file.tokens ? `${count(file.tokens)} tokens` : size(file.nbytes);
    const button = iconButton("close", `Remove ${file.name}`, remove);
    return el("li", { className: "chip" }, symbol(file), el("span", { className: "chip-name" }, file.name), el("small", {}, about), button);
  }
}

// Return what stands before a file's name: a small picture, or an icon.
const symbol = ({ image }) => (image ? el("img", { src: image, alt: "", className: "chip-image" }) : icon("file"));

// Return the files of a sent message: pictures are shown, text files open to show their text.
export function fileList(files) {
  const chips = files.map(({ name, nbytes, text, image }) => {
    if (image) return el("li", {}, el("img", { src: image, alt: name, title: name, className: "picture" }));
    const title = el("summary", { className: "chip" }, icon("file"), el("span", { className: "chip-name" }, name), el("small", {}, size(nbytes)));
    const details = el("details", {}, title);
    // long texts are laid out only when they are looked at
    const open = () => details.append(el("pre", { tabIndex: 0 }, text));
    details.addEventListener("toggle", open, { once: true });
    return el("li", {}, details);
  });
  return el("ul", { className: "files", ariaLabel: "Files" }, ...chips);
}
