// Which method, how many drafts, how warm; what the server's engines allow decides what can be moved.

const field = (id) => document.getElementById(id);

export class Settings {
  #models = []; // one a method

  constructor() {
    for (const id of ["k", "tree", "temperature"]) {
      field(id).addEventListener("input", () => this.#show());
    }
    field("method").addEventListener("change", () => this.#limits());
    field("settings").addEventListener("submit", (event) => event.preventDefault());
  }

  use(models) {
    // With several methods the first entry is the default's other name.
    this.#models = models.length > 1 ? models.slice(1) : models;
    field("method").replaceChildren(...this.#models.map((model) => new Option(model.method, model.id)));
    field("method").disabled = this.#models.length < 2;
    this.#limits();
  }

  methods() {
    return this.#models;
  }

  chosen() {
    return this.#models.find((model) => model.id === field("method").value);
  }

  // The part of a request that the settings decide, for one method.
  request(model) {
    const slider = model.tree ? "tree" : "k";
    const body = {
      model: model.id,
      temperature: Number(field("temperature").value),
      max_tokens: Math.max(1, Number(field("max-tokens").value) || 1),
      eyas: {},
    };
    // At most what the engine drafts anyway: nothing to ask for.
    const wanted = Number(field(slider).value);
    if (model.drafter && wanted < model.num_draft_tokens) body.eyas.num_draft_tokens = wanted;
    return body;
  }

  // The race runs every method, so what any of them drafts can be moved.
  limits(all) {
    this.all = all;
    this.#limits();
  }

  #limits() {
    const models = this.all ? this.#models : [this.chosen()].filter(Boolean);
    field("method").closest("label").hidden = Boolean(this.all);
    for (const [id, isMine] of [["k", (m) => m.drafter && !m.tree], ["tree", (m) => m.tree]]) {
      const most = Math.max(0, ...models.filter(isMine).map((model) => model.num_draft_tokens));
      const slider = field(id);
      const atEnd = Number(slider.value) >= Number(slider.max);
      slider.max = most;
      slider.disabled = most === 0;
      if (atEnd || Number(slider.value) > most) slider.value = most;
    }
    this.#show();
  }

  #show() {
    for (const id of ["k", "tree", "temperature"]) {
      field(`${id}-value`).textContent = field(id).disabled ? "-" : field(id).value;
    }
  }
}
