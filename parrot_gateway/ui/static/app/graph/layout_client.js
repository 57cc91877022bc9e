/** Asks the layout worker, one request at a time; of waiting requests only the newest is sent. */

export class Layout {
  #worker = new Worker(new URL("./layout.js", import.meta.url), { type: "module" });
  #isBusy = false;
  #next = null;

  /** @param {(placed: import("./layout.js").Placed) => void} onPlaced */
  constructor(onPlaced) {
    this.#worker.addEventListener("message", ({ data }) => {
      this.#isBusy = false;
      onPlaced(data);
      if (this.#next) this.#send(this.#next);
    });
  }

  /** Place boxes for a pane's width and height; `onPlaced` gets the result. */
  place(boxes, edges, pane) {
    const message = {
      boxes: boxes.map(({ id, kind, group }) => ({ id, kind, group })),
      edges: edges.map(({ key, from, to, label, isImplied }) => ({ key, from, to, label, isImplied })),
      pane,
    };
    if (this.#isBusy) this.#next = message;
    else this.#send(message);
  }

  close() {
    this.#worker.terminate();
  }

  #send(message) {
    this.#next = null;
    this.#isBusy = true;
    this.#worker.postMessage(message);
  }
}
