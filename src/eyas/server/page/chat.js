// The conversation.

import { stream } from "./answer.js";

export function setUpChat(settings, report) {
  const log = document.getElementById("log");
  const input = document.getElementById("message");
  const send = document.getElementById("send");
  const stop = document.getElementById("stop");
  const meterElement = document.getElementById("chat-meter");
  let messages = [];
  let running = null;

  function add(role, content = "") {
    const box = document.createElement("div");
    box.className = `message ${role}`;
    box.textContent = content;
    log.append(box);
    log.scrollTop = log.scrollHeight;
    return box;
  }

  async function ask() {
    const content = input.value.trim();
    if (!content || running) return;
    report(null);
    input.value = "";
    messages.push({ role: "user", content });
    add("user", content);
    const box = add("assistant");
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    log.setAttribute("aria-busy", "true"); // read out once it is whole, not token by token
    try {
      const body = { ...settings.request(settings.chosen()), messages };
      const view = { text: box, scroller: log, meterElement, signal: running.signal };
      const answer = await stream(body, view);
      box.dataset.reason = answer.reason;
      messages.push({ role: "assistant", content: answer.text });
    } catch (error) {
      messages.pop();
      box.remove();
      report(error);
    } finally {
      running = null;
      send.disabled = false;
      stop.disabled = true;
      log.removeAttribute("aria-busy");
      input.focus();
    }
  }

  document.getElementById("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  document.getElementById("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren();
    meterElement.replaceChildren();
    input.focus();
  });
  return () => running?.abort();
}
