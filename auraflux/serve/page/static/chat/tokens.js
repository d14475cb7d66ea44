// Counts tokens with the server's tokenizer.

import { request } from "./api.js";

const TIMEOUT_MS = 5000;

// Return the tokens of a body for /tokenize, or null if the server does not tell.
export async function countTokens(body) {
  try {
    const response = await request("tokenize", { body, signal: AbortSignal.timeout(TIMEOUT_MS), ask: false });
    const { count } = await response.json();
    return Number.isFinite(count) ? count : null;
  } catch {
    return null;
  }
}
