/** A state as a shape, so that it is not told by colour alone. */

import { html } from "../../vendor/preact.js";

const SHAPES = {
  waiting: html`<circle cx="8" cy="8" r="5" class="ring" />`,
  empty: html`<circle cx="8" cy="8" r="5" class="ring" />`,
  absent: html`<circle cx="8" cy="8" r="5" class="ring" />`,
  idle: html`<circle cx="8" cy="8" r="3.2" class="solid" />`,
  ended: html`<rect x="4.5" y="4.5" width="7" height="7" rx="1" class="ring" />`,
  running: html`<path d="M5 3.4v9.2L12.6 8z" class="solid" />`,
  serving: html`<path d="M5 3.4v9.2L12.6 8z" class="solid" />`,
  loading: html`<circle cx="8" cy="8" r="5" class="ring" />`,
  draining: html`<path d="M8 3v7M4.8 7.2 8 10.4l3.2-3.2M4 13h8" class="line" />`,
  done: html`<path d="M3.4 8.4l3.2 3.2 6-6.8" class="line" />`,
  ready: html`<path d="M3.4 8.4l3.2 3.2 6-6.8" class="line" />`,
  failed: html`<path d="M4.4 4.4l7.2 7.2M11.6 4.4l-7.2 7.2" class="line" />`,
  lost: html`<path d="M4.4 4.4l7.2 7.2M11.6 4.4l-7.2 7.2" class="line" />`,
  cancelled: html`<circle cx="8" cy="8" r="5" class="ring" /><path d="M4.6 11.4l6.8-6.8" class="line" />`,
};

/** Decoration: the state's name is written beside it, or in the surrounding label. */
export function StateMark({ state }) {
  return html`<svg class="mark is-${state}" viewBox="0 0 16 16" aria-hidden="true">
    ${SHAPES[state] ?? SHAPES.waiting}
  </svg>`;
}
