// A conversation is a tree of messages: an edited question or a retried answer is one more child of the same parent.
// `leaf` names the last message of the branch that is shown.

// identifiers that also work over plain HTTP, where crypto.randomUUID does not exist
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  const time = Date.now();
  return { id: newId(), title: "", created: time, updated: time, leaf: null, messages: [] };
}

// The messages of the branch that ends with `leaf`, first one first.
export function branch(conversation, leaf = conversation.leaf) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let one = byId.get(leaf); one && found.length <= byId.size; one = byId.get(one.parent)) found.unshift(one);
  return found;
}

export function siblings(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent);
}

// Add a message below `parent` (null: the first of a branch) and show it.
export function append(conversation, parent, fields) {
  const message = { id: newId(), parent, time: Date.now(), content: "", ...fields };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.updated = message.time;
  return message;
}

// Show the branch through `message`, down its newest children.
export function choose(conversation, message) {
  let tip = message;
  for (let next = tip; next; next = conversation.messages.findLast((other) => other.parent === tip.id)) tip = next;
  conversation.leaf = tip.id;
}

// Take out a message and all that answers it; show what is next to it, or what it answered.
export function remove(conversation, message) {
  const beside = siblings(conversation, message).filter((other) => other !== message);
  const gone = new Set([message.id]);
  // children come after their parents, so one pass finds all
  for (const other of conversation.messages) if (gone.has(other.parent)) gone.add(other.id);
  conversation.messages = conversation.messages.filter((other) => !gone.has(other.id));
  if (beside.length) choose(conversation, beside.at(-1));
  else conversation.leaf = message.parent;
}

// What to call a conversation: its first line, cut at a word.
export function titleFrom(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  if (line.length <= 56) return line;
  const cut = line.slice(0, 56);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), 32))}…`;
}
