/**
 * A canvas that may be painted less often than every frame: in between, the last painting is moved
 * and scaled with the camera.
 */

import { onNextFrame } from "../data/frame.js";

/** Paintings faster than this many milliseconds are done in every frame. */
const CHEAP_MS = 6;
/** After a slow painting, pause for this many times its duration. */
const SHARE = 4;
const LONGEST_PAUSE_MS = 400;

export class Bitmap {
  #view = null;
  #paintedAt = 0;
  #pause = 0;
  #timer = 0;

  /**
   * Paint, or show the last painting until the next one is due.
   *
   * @param {HTMLCanvasElement} canvas
   * @param {{x: number, y: number, scale: number}} view of the camera
   * @param {() => void} paint
   * @param {() => void} again called in a later frame if nothing was painted
   * @param {number} leastPause milliseconds between two paintings, because the work of a canvas after
   *   `paint`, on the compositor's thread or in software, cannot be measured here
   */
  show(canvas, view, paint, again, leastPause) {
    const begun = performance.now();
    const wait = this.#paintedAt + Math.max(this.#pause, leastPause) - begun;
    if (wait > 0) {
      const { x, y, scale } = this.#view;
      const grown = view.scale / scale;
      const moved = `translate(${view.x - x * grown}px, ${view.y - y * grown}px)`;
      canvas.style.transform = `${moved} scale(${grown})`;
      this.#timer ||= setTimeout(() => {
        this.#timer = 0;
        onNextFrame(again);
      }, wait);
      return;
    }
    paint();
    canvas.style.transform = "";
    this.#view = view;
    this.#paintedAt = performance.now();
    const took = this.#paintedAt - begun;
    this.#pause = took <= CHEAP_MS ? 0 : Math.min(LONGEST_PAUSE_MS, took * SHARE);
  }

  close() {
    clearTimeout(this.#timer);
  }
}
