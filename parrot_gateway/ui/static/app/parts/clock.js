/** A signal that moves while the page is seen, for times that go on. */

import { signal } from "../../vendor/preact.js";

/** Raised four times a second; read it in what shows how long something has taken. */
export const tick = signal(0);
/** Raised every five seconds, for "5 min ago". */
export const slowTick = signal(0);

setInterval(() => {
  if (document.hidden) return;
  tick.value += 1;
  if (tick.value % 20 === 0) slowTick.value += 1;
}, 250);
