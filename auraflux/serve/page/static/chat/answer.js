// Requests one answer: sends the conversation and fills a message from the stream.

import { request } from "./api.js";
import { joinedContent, promptContent } from "./files.js";
import { samplingFields } from "./sampling.js";
import { events } from "./stream.js";
import { countTokens } from "./tokens.js";

export class Answer {
  // `message` is filled in place, after what it holds already; `changed` is called after each change.
  constructor(message, changed) {
    this.message = message;
    this.changed = changed;
    this.abort = new AbortController();
    this.started = performance.now();
    this.before = message.figures ?? null;
    this.begun = { content: message.content, reasoning: message.reasoning ?? "" };
    this.chunks = 0;
    // a continued thought takes the time of all its parts
    this.thought_s = message.content ? 0 : (message.reasoning_s ?? 0);
    if (!message.content) delete message.reasoning_s;
    delete message.problem;
    Object.assign(message, { state: "writing", waiting: "", figures: null });
  }

  // Abort the request. The text received so far stays.
  stop() {
    this.abort.abort();
  }

  // Send `history` to the model that the promise `model` resolves to. An unfinished message is continued.
  async run(model, settings, history) {
    const { message } = this;
    try {
      const { id, max_model_len } = await abortable(this.abort.signal, model);
      message.model = id;
      this.messages = apiMessages(settings.system, this.isContinuation() ? [...history, message] : history);
      const body = { model: message.model, messages: this.messages, stream: true, stream_options: { include_usage: true } };
      Object.assign(body, samplingFields(settings));
      if (this.isContinuation()) Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
      const response = await request("v1/chat/completions", { body, signal: this.abort.signal, onwait: (why) => this.wait(why) });
      this.started = performance.now();
      this.wait("");
      for await (const event of events(response)) this.take(event);
      const full = message.figures?.context_tokens >= max_model_len;
      message.state = message.finish !== "length" ? "done" : full ? "full" : "length";
    } catch (error) {
      const stopped = this.abort.signal.aborted;
      message.state = stopped ? "stopped" : "failed";
      if (!stopped) message.problem = errorMessage(error);
    }
    this.endReasoning();
    delete message.finish;
    delete message.waiting;
    if (message.figures?.completion_tokens === undefined) this.countChunks();
    this.changed();
  }

  isContinuation() {
    return Boolean(this.begun.content || this.begun.reasoning);
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
    this.chunks += 1;
    this.ended = performance.now();
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
    const { message } = this;
    if (!message.reasoning || message.reasoning_s !== undefined) return;
    const last_s = this.thinking === undefined ? 0 : (performance.now() - this.thinking) / 1000;
    message.reasoning_s = this.thought_s + last_s;
  }

  // timings of the server override those measured here
  count(usage, timings) {
    const { prompt_tokens, completion_tokens } = usage;
    const cached_tokens = usage.prompt_tokens_details?.cached_tokens;
    const known = Object.entries(timings).filter(([, value]) => Number.isFinite(value));
    const measured = this.measured(completion_tokens, this.elapsed());
    this.setFigures({ ...measured, prompt_tokens, completion_tokens, cached_tokens, ...Object.fromEntries(known) });
  }

  // An interrupted answer comes without usage: chunks stand for tokens until `recount`.
  countChunks() {
    if (!this.chunks) this.message.figures = this.before;
    else this.setFigures({ ...this.measured(this.chunks, this.duration()), completion_tokens: this.chunks });
  }

  // Let the server count the tokens of an answer that came without usage.
  async recount() {
    const { message } = this;
    if (!this.chunks || message.figures.prompt_tokens !== undefined) return;
    const { content, reasoning } = this.begun;
    const added = (message.reasoning ?? "").slice(reasoning.length) + message.content.slice(content.length);
    const [completion_tokens, prompt_tokens] = await Promise.all([
      countTokens({ model: message.model, prompt: added, add_special_tokens: false }),
      countTokens({ model: message.model, messages: this.messages, add_generation_prompt: !this.isContinuation() }),
    ]);
    if (completion_tokens === null || prompt_tokens === null) return;
    this.setFigures({ ...this.measured(completion_tokens, this.duration()), prompt_tokens, completion_tokens });
    this.changed();
  }

  measured(completion_tokens, total_s) {
    const first_s = this.message.figures?.first_s ?? total_s;
    const tokens_per_s = total_s > first_s ? (completion_tokens - 1) / (total_s - first_s) : undefined;
    return { first_s, total_s, tokens_per_s };
  }

  // The figures are those of the last request, but the tokens of all parts of the answer.
  setFigures(figures) {
    const context_tokens = (figures.prompt_tokens ?? 0) + figures.completion_tokens;
    const completion_tokens = figures.completion_tokens + (this.before?.completion_tokens ?? 0);
    this.message.figures = { ...figures, completion_tokens, context_tokens };
  }

  elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  duration() {
    return (this.ended - this.started) / 1000;
  }
}

// Return the messages in the format of the API. Empty answers are dropped and the questions around them joined, because
// many chat templates refuse two user messages in a row.
function apiMessages(system, history) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of history) {
    const { role, reasoning } = message;
    const content = promptContent(message);
    if (role === "assistant" && !content && !reasoning) continue;
    const last = messages.at(-1);
    if (role === "user" && last?.role === "user") last.content = joinedContent(last.content, content);
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
