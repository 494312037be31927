// The same prompt by every method at once.

import { stream } from "./answer.js";

function column(model) {
  const box = document.createElement("article");
  box.className = "column";
  box.dataset.method = model.method;
  const title = document.createElement("h2");
  title.textContent = model.method;
  const bar = document.createElement("progress");
  bar.setAttribute("aria-label", `${model.method}: tokens so far`);
  const meterElement = document.createElement("p");
  meterElement.className = "meter";
  const text = document.createElement("div");
  text.className = "text";
  text.tabIndex = 0;
  box.append(title, bar, meterElement, text);
  return { box, title, bar, meterElement, text };
}

export function setUpRace(settings, report) {
  const columns = document.getElementById("columns");
  const note = document.getElementById("race-note");
  const prompt = document.getElementById("prompt");
  const start = document.getElementById("start");
  const stop = document.getElementById("race-stop");
  let running = null;

  // Places by the engine's time for each, as if alone: who was asked first has no lead.
  function rank(ended) {
    ended.sort((one, other) => one.seconds - other.seconds);
    ended.forEach(({ view, method }, index) => {
      view.title.textContent = `${index + 1}. ${method}`;
      view.box.classList.toggle("won", index === 0);
    });
  }

  async function run(model, body, signal, ended) {
    const view = column(model);
    columns.append(view.box);
    view.bar.max = body.max_tokens;
    view.bar.value = 0;
    const answer = await stream(body, {
      text: view.text,
      scroller: view.text,
      meterElement: view.meterElement,
      signal,
      onPiece: (meter) => { view.bar.value = meter.tokens; },
    });
    view.box.dataset.reason = answer.reason;
    if (answer.reason !== "stopped") {
      view.bar.value = view.bar.max;
      ended.push({ view, method: model.method, seconds: answer.meter.seconds });
      rank(ended);
    }
    return answer;
  }

  async function race() {
    if (running || !prompt.value.trim()) return;
    report(null);
    columns.replaceChildren();
    running = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    note.textContent = "The methods take turns on one machine, in equal time; tokens/s is each one's speed alone.";
    // One seed for all: with it, and at temperature 0, all must write the same.
    const seed = Math.floor(Math.random() * 2 ** 31);
    const messages = [{ role: "user", content: prompt.value }];
    const ended = [];
    try {
      const answers = await Promise.all(
        settings.methods().map((model) => {
          const body = { ...settings.request(model), messages, seed };
          return run(model, body, running.signal, ended);
        }),
      );
      if (answers.length > 1 && answers.every((answer) => answer.reason !== "stopped")) {
        const same = answers.every((answer) => answer.text === answers[0].text);
        note.textContent = same
          ? "All wrote the same text, token by token: drafting changes the speed and nothing else."
          : "The texts differ, which drafts drawn from the head's distribution may do above temperature 0, " +
            "and rounding below 32 bits.";
      }
    } catch (error) {
      running.abort();
      report(error);
    } finally {
      running = null;
      start.disabled = false;
      stop.disabled = true;
    }
  }

  document.getElementById("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      race();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  return () => running?.abort();
}
