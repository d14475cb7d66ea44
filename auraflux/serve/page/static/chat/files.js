// Reads the text files, PDFs and pictures that a user adds to a message, and writes them into the prompt.

import { pdfText } from "./pdf.js";

const KB = 1000;
export const MAX_FILE_NBYTES = 1000 * KB;
export const MAX_PDF_NBYTES = 50_000 * KB;
export const MAX_MESSAGE_NBYTES = 2000 * KB;
export const MAX_IMAGES_NBYTES = 20_000 * KB;
export const IMAGE = /^data:image\/(png|jpeg|webp|gif|bmp|avif);base64,/;

// Formats that hold text, but are not text files.
const CONVERT = { doc: "a Word document", docx: "a Word document", odt: "an ODT document", xlsx: "an Excel table" };

const megabytes = (nbytes) => `${(nbytes / KB / KB).toPrecision(nbytes < 10 * KB * KB ? 2 : 3)} MB`;

// Return a file as `readText` does, a picture as {name, nbytes, text: "", image} with a data URL. `before` has the files so far.
export async function readFile(file, before, takesImages) {
  const sum = (pictures) => before.filter(({ image }) => Boolean(image) === pictures).reduce((total, one) => total + one.nbytes, 0);
  if (!IMAGE.test(`data:${file.type};base64,`)) return readText(file, sum(false));
  if (!takesImages) throw new Error(`${file.name} is a picture, and this model reads text only.`);
  if (sum(true) + file.size > MAX_IMAGES_NBYTES) {
    throw new Error(`${file.name} does not fit: the pictures of a message may have at most ${megabytes(MAX_IMAGES_NBYTES)} together.`);
  }
  return { name: file.name, nbytes: file.size, text: "", image: await dataUrl(file) };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// Return a file as {name, nbytes, text}; throw an error with a sentence for the user if it cannot be used.
export async function readText(file, nbytesBefore = 0) {
  const { name } = file;
  if (!file.size) throw new Error(`${name} is empty or a folder.`);
  const isPdf = (await file.slice(0, 5).text()) === "%PDF-";
  checkSize(name, file.size, isPdf ? MAX_PDF_NBYTES : MAX_FILE_NBYTES);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const text = isPdf ? await pdfText(name, bytes) : decode(bytes);
  if (text === null) {
    const format = CONVERT[extension(name)];
    if (format) throw new Error(`${name} is ${format}. Save it as plain text, or copy its text into the message.`);
    throw new Error(`${name} is a binary file, and this model reads text only.`);
  }
  const nbytes = isPdf ? new TextEncoder().encode(text).length : file.size;
  checkSize(isPdf ? `The text of ${name}` : name, nbytes, MAX_FILE_NBYTES);
  if (nbytesBefore + nbytes > MAX_MESSAGE_NBYTES) {
    throw new Error(`${name} does not fit: the files of a message may have at most ${megabytes(MAX_MESSAGE_NBYTES)} together.`);
  }
  return { name, nbytes, text: text.replace(/\r\n?/g, "\n") };
}

function checkSize(what, nbytes, most) {
  if (nbytes > most) throw new Error(`${what} has ${megabytes(nbytes)}; a file may have at most ${megabytes(most)}.`);
}

// Return the text of a file, or null if it is binary.
function decode(bytes) {
  const starts = (...values) => values.every((value, at) => bytes[at] === value);
  if (starts(0xff, 0xfe)) return new TextDecoder("utf-16le").decode(bytes);
  if (starts(0xfe, 0xff)) return new TextDecoder("utf-16be").decode(bytes);
  if (bytes.includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    // text of older programs has no control characters but white space
    const control = bytes.some((byte) => byte < 32 && ![9, 10, 12, 13, 27].includes(byte));
    return control ? null : new TextDecoder("windows-1252").decode(bytes);
  }
}

const extension = (name) => (/\.(\w+)$/.exec(name)?.[1] ?? "").toLowerCase();

// Return the content of a message for the model: its text, or its pictures and then its text.
export function promptContent(message) {
  const pictures = (message.files ?? []).filter(({ image }) => image);
  const text = promptText(message);
  if (!pictures.length) return text;
  const parts = pictures.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// Return two contents as one.
export function joinedContent(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);
  return [...parts(first), ...parts(second)];
}

// Return the text of a message for the model: its files as blocks of code, then what the user wrote.
function promptText({ content, files = [] }) {
  const texts = files.filter(({ image }) => !image);
  const parts = texts.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    const language = extension(name).replace("pdf", "");
    return `File ${name}:\n\n${fence}${language}\n${text.trimEnd()}\n${fence}`;
  });
  if (content) parts.push(content);
  return parts.join("\n\n");
}
