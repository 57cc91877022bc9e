/** Asks for the gateway's key, which stays in this tab. */

import { html, useEffect, useRef } from "../../vendor/preact.js";
import { keyRequest } from "../data/api.js";

const WORDS = {
  view: ["This gateway needs a key", "The admin key where one is set, else the gateway's key."],
  admin: ["This needs the admin key", "The key of server.admin_key or PARROT_ADMIN_KEY."],
  calls: ["Calls need a key", "The key that clients send to this gateway."],
};

export function KeyDialog() {
  const dialog = useRef(null);
  const asked = keyRequest.value;
  useEffect(() => {
    if (asked && !dialog.current.open) dialog.current.showModal();
    if (!asked && dialog.current.open) dialog.current.close();
  }, [asked]);
  const [title, hint] = WORDS[asked?.kind ?? "view"];
  const onSubmit = (event) => {
    event.preventDefault();
    const { key } = event.target.elements;
    const typed = key.value.trim();
    key.value = "";
    keyRequest.value?.settle(typed);
  };
  return html`<dialog
    class="key-dialog"
    ref=${dialog}
    aria-labelledby="key-title"
    onCancel=${() => keyRequest.value?.settle("")}
  >
    <form onSubmit=${onSubmit}>
      <h2 id="key-title">${title}</h2>
      <p>${hint} It is kept in this tab until it is closed, and sent to this gateway alone.</p>
      <label>Key <input name="key" type="password" autocomplete="off" spellcheck=${false} required /></label>
      ${asked?.message && html`<p class="failure" role="alert">This key was not taken. ${asked.message}</p>`}
      <div class="dialog-buttons">
        <button type="button" onClick=${() => keyRequest.value?.settle("")}>Cancel</button>
        <button type="submit" class="primary">Use this key</button>
      </div>
    </form>
  </dialog>`;
}
