/** Placeholder for an empty view, with advice. */

import { html } from "../../vendor/preact.js";

export const Empty = ({ title, children }) =>
  html`<div class="empty-state"><h1>${title}</h1><div>${children}</div></div>`;
