/** Runs work once per frame, however often it is requested. */

const waiting = new Set();
let isScheduled = false;

function runAll() {
  isScheduled = false;
  // Skip work that earlier work removed with `forget`.
  for (const work of [...waiting]) if (waiting.delete(work)) work();
}

/** Call `work` in the next frame; repeated requests before that have no effect. */
export function onNextFrame(work) {
  waiting.add(work);
  if (isScheduled) return;
  isScheduled = true;
  // A hidden page gets no frames and need not be drawn; a timer keeps its data current.
  if (document.hidden) setTimeout(runAll, 1000);
  else requestAnimationFrame(runAll);
}

/** Cancel a request to call `work`. */
export const forget = (work) => waiting.delete(work);
