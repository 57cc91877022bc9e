/** Usage of each tenant since the gateway's start. */

import { html, signal } from "../../vendor/preact.js";
import { tenants } from "../data/overview.js";
import { cachedShare, count, percent } from "../format.js";
import { Empty } from "../parts/empty.js";

const COLUMNS = [
  ["tenant", "Tenant"],
  ["calls", "Calls"],
  ["running", "Running"],
  ["prompt_tokens", "Prompt tokens"],
  ["cached_tokens", "Cached"],
  ["output_tokens", "Output tokens"],
  ["errors", "Errors"],
];

const sorting = signal({ field: "calls", isDown: true });

export function Tenants() {
  const { field, isDown } = sorting.value;
  if (!tenants.value.length) {
    return html`<${Empty} title="No calls yet"><p>Calls are counted for the tenant of their key.</p><//>`;
  }
  const sign = isDown ? -1 : 1;
  const rows = [...tenants.value].sort((a, b) =>
    field === "tenant" ? sign * a.tenant.localeCompare(b.tenant) : sign * ((a[field] ?? 0) - (b[field] ?? 0)),
  );
  const sortBy = (name) => {
    sorting.value = { field: name, isDown: field === name ? !isDown : name !== "tenant" };
  };
  return html`<div class="page is-narrow">
    <h1 class="unseen">Tenants</h1>
    <section class="panel">
      <h2>Usage by tenant</h2>
      <div class="table-pane" tabindex="0" role="region" aria-label="Usage by tenant"><table>
        <thead><tr>${COLUMNS.map(([name, title]) => html`<th key=${name} scope="col" aria-sort=${field === name ? (isDown ? "descending" : "ascending") : "none"}>
          <button type="button" class="sort" onClick=${() => sortBy(name)}>${title}<span aria-hidden="true">${field === name ? (isDown ? " ↓" : " ↑") : ""}</span></button>
        </th>`)}</tr></thead>
        <tbody>${rows.map((row) => html`<tr key=${row.tenant}>
          <th scope="row">${row.tenant}</th><td>${count(row.calls)}</td><td>${count(row.running)}</td><td>${count(row.prompt_tokens)}</td>
          <td>${count(row.cached_tokens)} <small class="muted">${percent(cachedShare(row))}</small></td><td>${count(row.output_tokens)}</td>
          <td class=${row.errors ? "is-bad" : ""}>${count(row.errors)}</td>
        </tr>`)}</tbody>
      </table></div>
    </section>
  </div>`;
}
