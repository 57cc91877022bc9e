/** Work that is done once a frame, however often it is asked for. */

const waiting = new Set();
let isScheduled = false;

function runAll() {
  isScheduled = false;
  // What an earlier one has made `forget` is not done any more.
  for (const work of [...waiting]) if (waiting.delete(work)) work();
}

/** Call `work` in the next frame; asking again before that changes nothing. */
export function onNextFrame(work) {
  waiting.add(work);
  if (isScheduled) return;
  isScheduled = true;
  // A hidden page gets no frames, and need not be drawn; a timer keeps what it holds current.
  if (document.hidden) setTimeout(runAll, 1000);
  else requestAnimationFrame(runAll);
}

/** Call `work` no more. */
export const forget = (work) => waiting.delete(work);
