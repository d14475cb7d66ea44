// Has one answer written: sends the conversation so far and fills a message with what comes back.

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

  // What came stays.
  stop() {
    this.abort.abort();
  }

  // Ask `model`, a promise of what the server has, to go on from `history`.
  async run(model, settings, history) {
    const { message } = this;
    try {
      message.model = (await unless(this.abort.signal, model)).id;
      const messages = wire(settings.system, history);
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
      if (!stopped) message.problem = sentence(error);
    }
    this.settleReasoning();
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
    // servers send the same thoughts under both names
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (!thought && !delta.content) return;
    message.figures ??= { first_s: this.elapsed() };
    if (thought) {
      this.thinking ??= performance.now();
      message.reasoning = (message.reasoning ?? "") + thought;
    }
    if (delta.content) {
      this.settleReasoning();
      message.content += delta.content;
    }
  }

  settleReasoning() {
    if (this.thinking === undefined || this.message.reasoning_s !== undefined) return;
    this.message.reasoning_s = (performance.now() - this.thinking) / 1000;
  }

  // what the server measured goes before what is seen from here
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

// The messages as the API takes them. Answers that never came are left out and questions around them joined, because
// many templates refuse two questions in a row.
function wire(system, history) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning } of history) {
    if (role === "assistant" && !content && !reasoning) continue;
    const last = messages.at(-1);
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else messages.push({ role, content, ...(reasoning && { reasoning_content: reasoning }) });
  }
  return messages;
}

function unless(signal, promise) {
  const aborted = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason), { once: true }));
  return Promise.race([promise, aborted]);
}

function sentence(error) {
  if (error instanceof SyntaxError) return "The server sent something that is not JSON.";
  if (error instanceof TypeError) return "The connection was lost before the answer was complete.";
  return error.message;
}
