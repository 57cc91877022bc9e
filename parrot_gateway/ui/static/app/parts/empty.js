/** What stands where there is nothing to show, and what to do about it. */

import { html } from "../../vendor/preact.js";

export const Empty = ({ title, children }) =>
  html`<div class="empty-state"><h1>${title}</h1><div>${children}</div></div>`;
