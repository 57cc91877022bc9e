/** Asks the layout worker, one request at a time; of those that wait only the newest is sent. */

import { sizeOf } from "./sizes.js";

/**
 * @typedef {object} Placed
 * @property {Map<string, {x: number, y: number}>} at upper left corners of boxes
 * @property {Map<string, {x: number, y: number}[]>} [bends] of edges, by key
 * @property {boolean} runsDown edges run down, else to the right
 * @property {number} width
 * @property {number} height
 */

export class Layout {
  #worker = new Worker(new URL("./layout_worker.js", import.meta.url), { type: "module" });
  #request = 0;
  #isBusy = false;
  #next = null;

  /** @param {(placed: Placed) => void} onPlaced */
  constructor(onPlaced) {
    this.#worker.addEventListener("message", ({ data }) => {
      this.#isBusy = false;
      onPlaced(data);
      if (this.#next) this.#send(this.#next);
    });
  }

  /** Place boxes for a pane of a width and height; the answer comes by `onPlaced`. */
  place(boxes, edges, pane) {
    const message = {
      request: ++this.#request,
      aspect: pane.width / Math.max(1, pane.height),
      boxes: boxes.map((box) => ({
        id: box.id,
        ...sizeOf(box),
        group: box.group ?? null,
        stage: box.stage ?? 0,
      })),
      // Edges that others imply are drawn, and need no room of their own.
      edges: edges
        .filter((edge) => !edge.isImplied)
        .map(({ key, from, to, label }) => ({ key, from, to, label })),
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
