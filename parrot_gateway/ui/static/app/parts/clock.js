/** A signal that advances while the page is visible, for growing times. */

import { signal } from "../../vendor/preact.js";

/** Incremented four times a second; read it where elapsed times are shown. */
export const tick = signal(0);
/** Incremented every five seconds, for "5 min ago". */
export const slowTick = signal(0);

setInterval(() => {
  if (document.hidden) return;
  tick.value += 1;
  if (tick.value % 20 === 0) slowTick.value += 1;
}, 250);
