// The playground: streamed chats and completions.

import { Answer, tokensOf } from "./answer.js";
import { events, get, request } from "./api.js";
import { count, element, seconds } from "./format.js";
import { fillModels, InvalidField, mode, parameters, samples } from "./parameters.js";
import { track } from "./running.js";

const SHOW_EVERY_MS = 80; // chunks are shown in groups, since each layout costs as much as the whole answer
const byId = (id) => document.getElementById(id);

export class Playground {
  constructor(withKey) {
    this.withKey = withKey;
    this.history = []; // messages of a chat before the next one
    this.controller = null; // of the running request, or null
    this.started = false;
    byId("composer").onsubmit = (event) => {
      event.preventDefault();
      this.send();
    };
    byId("prompt").onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    };
    byId("parameters").onsubmit = (event) => event.preventDefault();
    byId("parameters").onchange = () => this.showMode();
    byId("stop-button").onclick = () => this.controller?.abort();
    byId("clear").onclick = () => this.clear();
    this.showMode();
  }

  shown(chosen) {
    if (!chosen || this.started) return;
    this.started = true;
    this.withKey(() => get("v1/models")).then(
      (models) => fillModels(models.data),
      (error) => (byId("parameter-problem").textContent = error.message),
    );
  }

  showMode() {
    byId("system-field").hidden = mode() !== "chat";
    byId("prompt").placeholder = `${mode() === "chat" ? "Message" : "Text to continue"} (Enter sends, Shift+Enter starts a new line)`;
  }

  clear() {
    this.controller?.abort();
    this.history = [];
    byId("messages").replaceChildren();
    byId("empty-hint").hidden = false;
    byId("progress").textContent = "";
  }

  async send() {
    const prompt = byId("prompt").value;
    if (this.controller !== null || !prompt.trim()) return;
    byId("parameter-problem").textContent = "";
    let body;
    try {
      body = parameters();
    } catch (error) {
      if (!(error instanceof InvalidField)) throw error;
      byId("parameter-problem").textContent = error.message;
      error.field.focus();
      return;
    }
    const chats = mode() === "chat";
    const system = byId("system").value.trim();
    const message = { role: "user", content: prompt };
    const before = system ? [{ role: "system", content: system }] : [];
    Object.assign(body, chats ? { messages: [...before, ...this.history, message] } : { prompt });
    byId("prompt").value = "";
    byId("empty-hint").hidden = true;
    this.append(element("li", "said", prompt));
    const run = new Run(this.append(element("li", "answers")), samples());
    this.controller = new AbortController();
    this.setRunning(true);
    try {
      await this.withKey(() => run.follow(chats ? "v1/chat/completions" : "v1/completions", body, this.controller));
    } catch (error) {
      run.fail(error);
    }
    if (chats && run.answers[0].text) this.history.push(message, { role: "assistant", content: run.answers[0].text });
    this.controller = null;
    this.setRunning(false);
  }

  setRunning(running) {
    byId("send").disabled = running;
    byId("stop-button").disabled = !running;
    if (!running) byId("prompt").focus();
  }

  append(item) {
    byId("messages").append(item);
    item.scrollIntoView({ block: "end" });
    return item;
  }
}

// A request, and the answers of its samples.
class Run {
  constructor(node, n) {
    this.node = node;
    this.answers = Array.from({ length: n }, (_, index) => new Answer(n > 1 ? index : null, byId("alternatives")));
    this.node.append(...this.answers.map((answer) => answer.node));
    this.beganAt = performance.now();
    this.firstAt = null;
    this.tokens = 0;
    this.pending = []; // chunks that are not shown yet
    this.timer = null;
  }

  async follow(path, body, controller) {
    const running = track(controller);
    try {
      const answer = await request(path, { body, signal: controller.signal });
      running.setId(answer.headers.get("x-request-id"));
      for await (const event of events(answer)) {
        this.pending.push([event, performance.now()]);
        this.timer ??= setTimeout(() => this.show(), SHOW_EVERY_MS);
      }
    } finally {
      running.end();
      this.show();
    }
  }

  show() {
    clearTimeout(this.timer);
    this.timer = null;
    const list = byId("messages");
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
    for (const [event, at] of this.pending.splice(0)) this.take(event, at);
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  take(event, at) {
    for (const choice of event.choices) {
      const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
      const thoughts = choice.delta?.reasoning_content;
      const tokens = tokensOf(choice);
      if (text || thoughts) {
        this.firstAt ??= at;
        this.tokens += tokens?.length || 1;
      }
      this.answers[choice.index].push(text, tokens, thoughts);
      if (choice.finish_reason) this.answers[choice.index].finish(choice.finish_reason);
    }
    if (event.usage) this.measure(event.usage, at);
    else byId("progress").textContent = `${count(this.tokens)} tokens · ${seconds((at - this.beganAt) / 1000)}`;
  }

  measure(usage, at) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const parts = [
      `${count(usage.prompt_tokens)} prompt tokens${cached ? ` (${count(cached)} cached)` : ""}`,
      `${count(usage.completion_tokens)} generated`,
    ];
    if (this.firstAt !== null) {
      parts.push(`first after ${seconds((this.firstAt - this.beganAt) / 1000)}`);
      const decoding = (at - this.firstAt) / 1000;
      if (decoding > 0.02) parts.push(`${count(usage.completion_tokens / decoding)} tokens / s`);
    }
    if (usage.timing) {
      const { queue_ms, prefill_ms, decode_ms } = usage.timing;
      parts.push(`queue ${queue_ms} ms, prefill ${prefill_ms} ms, decode ${decode_ms} ms`);
    }
    this.node.append(element("p", "usage", parts.join(" · ")));
    byId("progress").textContent = "";
  }

  fail(error) {
    const stopped = error.name === "AbortError";
    for (const answer of this.answers) if (!answer.end.textContent) answer.finish(stopped ? "stopped" : "error");
    const problem = element("p", stopped ? "usage" : "problem", stopped ? "Stopped. The request was cancelled." : error.message);
    if (!stopped) problem.setAttribute("role", "alert");
    this.node.append(problem);
    byId("progress").textContent = "";
  }
}
