/** What stands where there is nothing to show, and what to do about it. */

import { html } from "../../vendor/preact.js";

export const Empty = ({ title, children }) =>
  html`<div class="empty-state"><h2>${title}</h2><div>${children}</div></div>`;
