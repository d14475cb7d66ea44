// Sends HTTP requests to the server of this page: adds the API key, asks for one on 401, retries on 429 and 503.

const KEY = "auraflux.key";
const WAIT_S = 2;

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let askForKey = async () => null;
let asking = null;

// Set the function that asks the user for a key. It takes the key that was refused, "" for none, and resolves to a key or null.
export function onKeyWanted(ask) {
  askForKey = ask;
}

export const key = () => localStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) localStorage.setItem(KEY, value);
  else localStorage.removeItem(KEY);
}

// Send a request and retry while the server is loading or busy; `onwait` gets the reason. Return a response with an ok status.
// With `ask`, a refused key makes the page ask for another.
export async function request(path, { body = null, signal = null, onwait = () => {}, ask = true } = {}) {
  for (;;) {
    const sent = key();
    const response = await send(path, body, sent, signal);
    if (response.ok) return response;
    const message = await problem(response);
    if (response.status === 401) {
      if (ask && (key() !== sent || (await askForNewKey(sent)))) continue;
      throw new ServerError(sent ? "The server did not accept the API key." : "The server asks for an API key.", 401);
    }
    if (!isTransient(response)) throw new ServerError(message, response.status);
    onwait(response.status === 503 ? "The model is loading" : "The server is busy");
    await pause(Number(response.headers.get("retry-after")) || WAIT_S, signal);
  }
}

async function send(path, body, key, signal) {
  const strange = unsendable(key);
  if (strange) throw new ServerError(`The API key in the settings has a character that no key has: ${strange}`);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) {
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
}

const isTransient = (response) => [429, 503].includes(response.status) && response.headers.get("x-should-retry") !== "false";

async function problem(response) {
  try {
    const { error } = await response.json();
    return (typeof error === "string" ? error : error.message) || `The server answered ${response.status}.`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

// Return the first character that an HTTP header cannot hold, null if there is none.
export const unsendable = (key) => /[^\x21-\x7e]/u.exec(key)?.[0] ?? null;

// Ask the user for a key; return whether there is one. Several requests may fail at once; the user is asked once.
export async function askForNewKey(refused) {
  asking ??= askForKey(refused).finally(() => (asking = null));
  const given = await asking;
  if (given) setKey(given);
  return Boolean(given);
}

export function pause(seconds, signal = null) {
  return new Promise((resolve, reject) => {
    const aborted = () => reject(new DOMException("stopped", "AbortError"));
    if (signal?.aborted) return aborted();
    setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", aborted, { once: true });
    return undefined;
  });
}
