// A conversation is a tree of messages: an edited question or a retried answer is another child of the same parent.
// `leaf` is the id of the last message of the branch on screen.

// crypto.randomUUID does not exist over plain HTTP
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings) {
  const time = Date.now();
  return { id: newId(), title: "", created: time, updated: time, leaf: null, messages: [], settings };
}

// Return the messages of the branch that ends with `leaf`, in order.
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

// Remove a message and its descendants. Show a sibling, or the parent if there is none.
export function remove(conversation, message) {
  const others = siblings(conversation, message).filter((other) => other !== message);
  const gone = new Set([message.id]);
  // children come after their parents, so one pass finds all
  for (const other of conversation.messages) if (gone.has(other.parent)) gone.add(other.id);
  conversation.messages = conversation.messages.filter((other) => !gone.has(other.id));
  if (others.length) choose(conversation, others.at(-1));
  else conversation.leaf = message.parent;
}

// Return a title: the first line, cut at a word.
export function titleFrom(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  if (line.length <= 56) return line;
  const cut = line.slice(0, 56);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), 32))}…`;
}
