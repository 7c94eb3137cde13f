// The answer of one sample: its text, with each token coloured by its probability, and the alternatives of a token.

import { element, probability } from "./format.js";

// Returns [{ text, logprob, others: [{ text, logprob }] }] of a choice of either endpoint, or null without logprobs.
export function tokensOf(choice) {
  const { logprobs } = choice;
  if (!logprobs) return null;
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token,
      logprob: each.logprob,
      others: each.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    others: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

export class Answer {
  // `number` is the sample's index, or null for a single sample. `alternatives` is the element that shows alternatives.
  constructor(number, alternatives) {
    this.text = "";
    this.node = element("article", "answer");
    if (number !== null) this.node.append(element("span", "sample", String(number + 1)));
    this.thoughts = null;
    this.body = element("div", "text");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", number === null ? "Answer" : `Answer ${number + 1}`);
    this.end = element("span", "finish");
    this.node.append(this.body, this.end);
    this.alternatives = alternatives;
    this.current = null;
    this.body.onpointerover = (event) => this.select(event.target.closest(".token"));
    this.body.onpointerleave = () => this.select(null);
    this.body.onfocus = () => this.body.matches(":focus-visible") && this.select(this.body.querySelector(".token"));
    this.body.onblur = () => this.select(null);
    this.body.onkeydown = (event) => this.step(event);
  }

  push(text, tokens, thoughts) {
    if (thoughts) this.think(thoughts);
    this.text += text;
    if (!tokens?.length) {
      if (text) this.body.append(text);
    } else if (tokens.map((token) => token.text).join("") === text) {
      this.body.append(...tokens.map((token) => this.token(token.text, [token])));
    } else if (text) {
      // Several tokens may form one character, or the text may lack markers that the tokens have.
      this.body.append(this.token(text, tokens));
    }
  }

  finish(reason) {
    this.end.textContent = reason;
    this.end.classList.add(`finish-${reason}`);
  }

  think(text) {
    if (this.thoughts === null) {
      this.thoughts = element("details", "thoughts");
      this.thoughts.append(element("summary", "", "Reasoning"), element("div"));
      this.body.before(this.thoughts);
    }
    this.thoughts.lastChild.append(text);
  }

  token(text, tokens) {
    const span = element("span", "token", text);
    span.style.setProperty("--p", Math.exp(Math.min(...tokens.map((token) => token.logprob ?? 0))).toFixed(4));
    span.tokens = tokens;
    return span;
  }

  step(event) {
    const way = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    if (way === undefined || this.current === null) return;
    event.preventDefault();
    const next = this.current[way];
    if (next !== null) this.select(next);
  }

  select(token) {
    this.current?.classList.remove("current");
    this.current = token;
    this.alternatives.hidden = token === null;
    if (token === null) return;
    token.classList.add("current");
    this.alternatives.replaceChildren(...token.tokens.map(table));
    const box = token.getBoundingClientRect();
    const size = this.alternatives.getBoundingClientRect();
    const above = box.bottom + size.height + 8 > innerHeight;
    const left = Math.max(4, Math.min(box.left, document.documentElement.clientWidth - size.width - 8));
    this.alternatives.style.left = `${left}px`;
    this.alternatives.style.top = `${above ? Math.max(4, box.top - size.height - 6) : box.bottom + 6}px`;
  }
}

function table(token) {
  const rows = [{ text: token.text, logprob: token.logprob, chosen: true }];
  rows.push(...token.others.filter((other) => other.text !== token.text));
  rows.sort((a, b) => b.logprob - a.logprob);
  const made = element("table");
  for (const row of rows) {
    const line = element("tr", row.chosen ? "chosen" : "");
    const bar = element("meter");
    bar.value = Math.exp(row.logprob);
    line.append(element("td", "code", visible(row.text)), element("td"), element("td", "number", probability(bar.value)));
    line.children[1].append(bar);
    made.append(line);
  }
  return made;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";
