// Requests one answer: sends the conversation and fills a message from the stream.

import { request } from "./api.js";
import { events } from "./stream.js";

export class Answer {
  // `message` is filled in place; `changed` is called after each change.
  constructor(message, changed) {
    this.message = message;
    this.changed = changed;
    this.abort = new AbortController();
    this.started = performance.now();
    Object.assign(message, { state: "writing", waiting: "" });
  }

  // Abort the request. The text received so far stays.
  stop() {
    this.abort.abort();
  }

  // Send `history` to the model that the promise `model` resolves to.
  async run(model, settings, history) {
    const { message } = this;
    try {
      message.model = (await abortable(this.abort.signal, model)).id;
      const messages = apiMessages(settings.system, history);
      const body = { model: message.model, messages, stream: true, stream_options: { include_usage: true } };
      for (const name of ["temperature", "top_p", "max_tokens"]) if (settings[name] !== null) body[name] = settings[name];
      const response = await request("v1/chat/completions", { body, signal: this.abort.signal, onwait: (why) => this.wait(why) });
      this.started = performance.now();
      this.wait("");
      for await (const event of events(response)) this.take(event);
      message.state = message.finish === "length" ? "length" : "done";
    } catch (error) {
      const stopped = this.abort.signal.aborted;
      message.state = stopped ? "stopped" : "failed";
      if (!stopped) message.problem = errorMessage(error);
    }
    this.endReasoning();
    delete message.finish;
    delete message.waiting;
    this.changed();
  }

  wait(why) {
    this.message.waiting = why;
    this.changed();
  }

  take(event) {
    const { message } = this;
    if (event.error) throw new Error(event.error.message || "The server could not finish the answer.");
    const choice = event.choices?.[0];
    if (choice) this.write(choice.delta ?? {});
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (event.usage) this.count(event.usage, event.timings ?? {});
    this.changed();
  }

  write(delta) {
    const { message } = this;
    // servers send the same reasoning under both names
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (!thought && !delta.content) return;
    message.figures ??= { first_s: this.elapsed() };
    if (thought) {
      this.thinking ??= performance.now();
      message.reasoning = (message.reasoning ?? "") + thought;
    }
    if (delta.content) {
      this.endReasoning();
      message.content += delta.content;
    }
  }

  endReasoning() {
    if (this.thinking === undefined || this.message.reasoning_s !== undefined) return;
    this.message.reasoning_s = (performance.now() - this.thinking) / 1000;
  }

  // timings of the server override those measured here
  count(usage, timings) {
    const total_s = this.elapsed();
    const first_s = this.message.figures?.first_s ?? total_s;
    const tokens_per_s = total_s > first_s ? (usage.completion_tokens - 1) / (total_s - first_s) : undefined;
    const cached_tokens = usage.prompt_tokens_details?.cached_tokens;
    const { prompt_tokens, completion_tokens } = usage;
    const known = Object.entries(timings).filter(([, value]) => Number.isFinite(value));
    this.message.figures = {
      first_s, total_s, tokens_per_s, prompt_tokens, completion_tokens, cached_tokens, ...Object.fromEntries(known),
    };
  }

  elapsed() {
    return (performance.now() - this.started) / 1000;
  }
}

// Return the messages in the format of the API. Empty answers are dropped and the questions around them joined, because
// many chat templates refuse two user messages in a row.
function apiMessages(system, history) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning } of history) {
    if (role === "assistant" && !content && !reasoning) continue;
    const last = messages.at(-1);
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else messages.push({ role, content, ...(reasoning && { reasoning_content: reasoning }) });
  }
  return messages;
}

function abortable(signal, promise) {
  const aborted = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason), { once: true }));
  return Promise.race([promise, aborted]);
}

function errorMessage(error) {
  if (error instanceof SyntaxError) return "The server sent something that is not JSON.";
  if (error instanceof TypeError) return "The connection was lost before the answer was complete.";
  return error.message;
}
