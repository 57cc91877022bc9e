/** Copyable text: a block with a button. */

import { html, useSignal } from "../../vendor/preact.js";

export function CopyBlock({ text, label }) {
  return html`<div class="copy-block">
    <pre tabindex="0" role="region" aria-label=${label}><code>${text}</code></pre>
    <${CopyButton} text=${text} label=${`Copy ${label}`} />
  </div>`;
}

export function CopyButton({ text, label }) {
  const isDone = useSignal(false);
  const copy = async () => {
    await copyText(text);
    isDone.value = true;
    setTimeout(() => (isDone.value = false), 1500);
  };
  return html`<button type="button" class="copy" onClick=${copy} aria-label=${label}>
    ${isDone.value ? "Copied" : "Copy"}
  </button>`;
}

/** The clipboard exists only on https and loopback; elsewhere copy a selection. */
async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text).catch(() => {});
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
