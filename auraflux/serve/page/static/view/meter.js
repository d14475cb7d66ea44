// The context meter: the tokens of the conversation and of the files that wait, of those that the model can hold.

import { byId } from "./dom.js";
import { count } from "./figures.js";

const HIGH = 0.8;

// Return the tokens in the context after the last answer of a branch, 0 if unknown.
export function contextTokens(messages) {
  const figures = messages.findLast((message) => message.figures?.prompt_tokens)?.figures;
  return figures ? (figures.context_tokens ?? figures.prompt_tokens + (figures.completion_tokens ?? 0)) : 0;
}

// Show `used` tokens and those of waiting files; `total` is the model's context.
export function showMeter(used, waiting, total) {
  const meter = byId("meter");
  meter.hidden = !total || !(used + waiting);
  if (meter.hidden) return;
  const share = (tokens) => `${Math.min((100 * tokens) / total, 100)}%`;
  const all = used + waiting;
  byId("meter-used").style.width = share(used);
  byId("meter-waiting").style.width = share(Math.min(waiting, total - used));
  meter.dataset.level = all > total ? "over" : all > HIGH * total ? "high" : "low";
  const parts = [used, waiting].filter(Boolean).map(count);
  byId("meter-text").textContent = `${parts.join(" + ")} of ${count(total)} tokens`;
  meter.title = all > total ? "This does not fit into the model's context" : "Tokens in the model's context";
}
