/** The visible part of the picture: an offset in pixels and a scale. */

import { signal } from "../../vendor/preact.js";

const MIN_SCALE = 0.03;
const MAX_SCALE = 2;
/** A small graph is not enlarged to fill the pane. */
const MAX_FIT = 1.05;
const MARGIN = 28;
const READABLE = 0.55;
/** Margins above the picture for frame names, and below for legend and buttons. */
const TOP = 34;
const BOTTOM = 64;

export class Camera {
  /** `{x, y, scale}`: screen position of the picture's origin, and pixels per unit. */
  view = signal({ x: 0, y: 0, scale: 1 });
  /** Size of the pane in pixels. */
  width = 0;
  height = 0;
  /** True until the user moves it: the view follows the growing picture. */
  isFree = true;

  resize(width, height) {
    this.width = width;
    this.height = height;
  }

  /** Show a whole picture; if a small graph would be unreadable, show its beginning. */
  fit(width, height, isSmall = false) {
    if (!this.width || !width) return;
    const across = (this.width - 2 * MARGIN) / width;
    const down = (this.height - TOP - BOTTOM) / height;
    const scale = clamp(Math.min(across, down, MAX_FIT));
    if (isSmall && scale < READABLE) {
      const x = width * READABLE > this.width ? MARGIN : (this.width - width * READABLE) / 2;
      const y = height * READABLE > this.height ? TOP : (this.height - height * READABLE) / 2;
      this.view.value = { x, y, scale: READABLE };
      return;
    }
    this.view.value = {
      x: (this.width - width * scale) / 2,
      y: TOP + (this.height - TOP - BOTTOM - height * scale) / 2,
      scale,
    };
  }

  pan(dx, dy) {
    const { x, y, scale } = this.view.value;
    this.isFree = false;
    this.view.value = { x: x + dx, y: y + dy, scale };
  }

  /** Scale by a factor and keep the point (px, py) in place. */
  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const { x, y, scale } = this.view.value;
    const next = clamp(scale * factor);
    this.isFree = false;
    const moved = next / scale;
    this.view.value = { x: px - (px - x) * moved, y: py - (py - y) * moved, scale: next };
  }

  /** Move as little as needed to show a box at a readable scale. */
  reveal(box, minScale = 0.6) {
    if (this.view.value.scale < minScale) {
      this.zoom(minScale / this.view.value.scale, ...this.#onScreen(box));
    }
    const { scale } = this.view.value;
    const [x, y] = this.#onScreen(box);
    const across = (box.width * scale) / 2 + MARGIN;
    const down = (box.height * scale) / 2 + MARGIN;
    const dx = Math.min(0, this.width - across - x) || Math.max(0, across - x);
    const dy = Math.min(0, this.height - down - y) || Math.max(0, down - y);
    if (dx || dy) this.pan(dx, dy);
  }

  #onScreen(box) {
    const { x, y, scale } = this.view.value;
    return [(box.x + box.width / 2) * scale + x, (box.y + box.height / 2) * scale + y];
  }
}

const clamp = (scale) => Math.min(MAX_SCALE, Math.max(MIN_SCALE, scale));
