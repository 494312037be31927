// One answer on its way: its tokens in colour, its acceptance length and its speed.

import { chat } from "./api.js";

export const DEEPEST = 8; // colours; deeper drafts share the last

export function depthClass(depth) {
  return `depth-${Math.min(depth, DEEPEST)}`;
}

export function describe(depth) {
  return depth === 0 ? "chosen by the target" : `drafted, accepted at depth ${depth}`;
}

// Numbers of one answer. Seconds are the engine's own, so that methods that share it compare as if alone.
export class Meter {
  tokens = 0;
  steps = 0;
  draftSteps = 0;
  drafted = 0;
  accepted = 0;
  #first = null;
  #seconds = 0;

  add(trace) {
    this.tokens += trace.num_tokens;
    this.steps = trace.num_steps;
    this.draftSteps = trace.num_draft_steps;
    this.drafted = trace.num_drafted;
    this.accepted = trace.num_accepted;
    this.#seconds = trace.engine_seconds;
    // The first step comes with the prompt's prefill: the speed is that of what follows.
    if (this.#first === null && this.tokens) this.#first = { tokens: this.tokens, seconds: this.#seconds };
  }

  get acceptanceLength() {
    if (!this.draftSteps) return this.steps ? 1 : 0;
    return 1 + this.accepted / this.draftSteps;
  }

  get seconds() {
    return this.#seconds;
  }

  get speed() {
    const seconds = this.#first ? this.#seconds - this.#first.seconds : 0;
    return seconds > 0 ? (this.tokens - this.#first.tokens) / seconds : 0;
  }

  show(element) {
    element.replaceChildren();
    const parts = [
      ["tokens", this.tokens, "tokens"],
      ["steps", this.steps, "steps"],
      ["al", this.acceptanceLength.toFixed(2), "acceptance length"],
      ["speed", this.speed.toFixed(1), "tokens/s"],
    ];
    for (const [name, value, text] of parts) {
      const number = document.createElement("b");
      number.dataset.meter = name;
      number.textContent = value;
      element.append(number, ` ${text}   `);
    }
  }
}

function isAtEnd(box) {
  return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
}

// Streams one answer into `text` (and `scroller`), its numbers into `meterElement`; returns
// {text, meter, reason}. A stop through `signal` is no error: the reason is then "stopped".
export async function stream(body, { text, scroller, meterElement, signal, onPiece }) {
  const meter = new Meter();
  let whole = "";
  let reason = "stopped";
  try {
    for await (const event of chat({ ...body, eyas: { ...body.eyas, provenance: true } }, signal)) {
      const choice = event.choices[0];
      if (!choice?.eyas) continue;
      const follow = isAtEnd(scroller);
      for (const [part, depth] of choice.eyas.parts) {
        const span = document.createElement("span");
        span.className = `token ${depthClass(depth)}`;
        span.title = describe(depth);
        span.textContent = part;
        text.append(span);
        whole += part;
      }
      meter.add(choice.eyas);
      meter.show(meterElement);
      if (follow) scroller.scrollTop = scroller.scrollHeight;
      if (choice.finish_reason) reason = choice.finish_reason;
      onPiece?.(meter);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  return { text: whole, meter, reason };
}
