// Serializes conversations to JSON and parses them, keeping only known fields.

import { IMAGE } from "./files.js";
import { readSettings } from "./sampling.js";
import { newId } from "./tree.js";

const FORMAT = "auraflux-conversations";

export function pack(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);
}

// Parse the output of `pack`. Conversations get new ids, so none is overwritten.
export function unpack(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error("The file holds no conversations exported from this page.");
  }
  return data.conversations.map(conversation);
}

function conversation(given) {
  const messages = [];
  const known = new Set();
  for (const one of Array.isArray(given?.messages) ? given.messages : []) {
    const message = readMessage(one);
    const placed = message.parent === null || known.has(message.parent);
    if (!placed || !message.id || known.has(message.id)) continue;
    known.add(message.id);
    messages.push(message);
  }
  const leaf = known.has(given?.leaf) ? given.leaf : (messages.at(-1)?.id ?? null);
  const [title, created, updated] = [string(given?.title), time(given?.created), time(given?.updated)];
  return { id: newId(), title, created, updated, leaf, messages, settings: readSettings(given?.settings) };
}

function readMessage(given) {
  const message = {
    id: string(given?.id),
    parent: typeof given?.parent === "string" ? given.parent : null,
    role: given?.role === "user" ? "user" : "assistant",
    time: time(given?.time),
    content: string(given?.content),
  };
  for (const name of ["reasoning", "model", "problem"]) if (given?.[name]) message[name] = string(given[name]);
  if (Number.isFinite(given?.reasoning_s)) message.reasoning_s = given.reasoning_s;
  if (message.role === "user" && Array.isArray(given.files)) message.files = given.files.map(readFile);
  if (message.role === "assistant") {
    message.state = ["stopped", "failed", "length", "full"].includes(given?.state) ? given.state : "done";
    message.figures = figures(given?.figures);
  }
  return message;
}

function readFile(given) {
  const [name, text, image] = [string(given?.name), string(given?.text), string(given?.image)];
  if (!IMAGE.test(image)) return { name, nbytes: text.length, text };
  return { name, nbytes: Number.isFinite(given?.nbytes) ? given.nbytes : image.length, text: "", image };
}

function figures(given) {
  const numbers = Object.entries(given ?? {}).filter(([, value]) => Number.isFinite(value));
  return numbers.length ? Object.fromEntries(numbers) : null;
}

const string = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) ? value : Date.now());
