/** Text for screen readers that changes at most every five seconds. */

import { html, useEffect, useRef, useSignal } from "../../vendor/preact.js";

const INTERVAL_MS = 5_000;

export function LiveRegion({ text }) {
  const said = useSignal("");
  const newest = useRef(text);
  newest.current = text;
  useEffect(() => {
    const timer = setInterval(() => (said.value = newest.current), INTERVAL_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<p class="unseen" role="status" aria-live="polite">${said.value}</p>`;
}
