// Puts the page together: tabs, settings, legend, errors.

import { DEEPEST, depthClass, describe } from "./answer.js";
import { models, setKey } from "./api.js";
import { setUpChat } from "./chat.js";
import { setUpRace } from "./race.js";
import { Settings } from "./settings.js";

const settings = new Settings();
const errorBox = document.getElementById("error");

function report(error) {
  errorBox.hidden = error === null;
  errorBox.textContent = error === null ? "" : error.message;
}

async function connect() {
  try {
    const found = await models();
    settings.use(found);
    document.getElementById("model").textContent = found[0].id;
    drawLegend(found);
    report(null);
  } catch (error) {
    document.getElementById("model").textContent = "not connected";
    document.getElementById("key-field").hidden = error.status !== 401;
    report(error);
  }
}

function drawLegend(found) {
  const legend = document.getElementById("legend");
  const deepest = Math.min(DEEPEST, Math.max(0, ...found.map((model) => model.num_draft_tokens)));
  legend.replaceChildren();
  for (let depth = 0; depth <= deepest; depth++) {
    const mark = document.createElement("span");
    mark.className = depthClass(depth);
    mark.title = describe(depth);
    mark.textContent = depth === 0 ? "target" : `depth ${depth}${depth === DEEPEST ? " and more" : ""}`;
    legend.append(mark);
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function open(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  settings.limits(tab.id === "tab-race");
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    open(next);
    next.focus();
  });
}

const stops = [setUpChat(settings, report), setUpRace(settings, report)];
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stops.forEach((stop) => stop());
});
document.getElementById("key").addEventListener("change", (event) => {
  setKey(event.target.value);
  connect();
});
connect();
