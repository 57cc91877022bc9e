/** The page: header, the view that the address names, and the connection to the gateway. */

import { html, render, useEffect, useSignal } from "../vendor/preact.js";
import { connection, followGateway, gateway, refusal } from "./data/overview.js";
import { compact, duration } from "./format.js";
import { Empty } from "./parts/empty.js";
import { KeyDialog } from "./parts/key_dialog.js";
import { chooseTheme, chosenTheme } from "./parts/palette.js";
import { hrefOf, route } from "./route.js";
import { Compare } from "./views/compare.js";
import { Engines } from "./views/engines.js";
import { Playground } from "./views/playground.js";
import { Scheduler } from "./views/scheduler.js";
import { Sessions } from "./views/sessions.js";
import { Tenants } from "./views/tenants.js";

/** Views that scroll as a whole can take the focus, so that keys scroll them. */
const VIEWS = [
  { name: "sessions", title: "Sessions", View: Sessions },
  { name: "engines", title: "Engines", View: Engines, scrolls: true },
  { name: "scheduler", title: "Scheduler", View: Scheduler, scrolls: true },
  { name: "tenants", title: "Tenants", View: Tenants, scrolls: true },
  { name: "playground", title: "Playground", View: Playground },
  { name: "compare", title: "Compare", View: Compare, scrolls: true },
];

const CONNECTIONS = {
  connecting: "Connecting",
  live: "Live",
  lost: "Connection lost, trying again",
  refused: "Not connected",
};

function Head({ current }) {
  const calls = gateway.value?.calls;
  return html`<header class="head">
    <a class="skip" href="#content" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("content").focus();
    }}>Skip to the content</a>
    <a class="brand" href=${hrefOf("sessions")}><img src="favicon.svg" alt="" width="22" height="22" /><span>Parrot Gateway</span></a>
    ${VIEWS.length > 1 && html`<nav aria-label="Views">
      ${VIEWS.map(({ name, title }) => html`<a key=${name} href=${hrefOf(name)} aria-current=${name === current ? "page" : undefined}>${title}</a>`)}
    </nav>`}
    <div class="head-facts">
      ${calls && html`<span class="head-calls" title="Calls now">
        <b>${compact(calls.running ?? 0)}</b> running${calls.waiting ? html` <b>${compact(calls.waiting)}</b> waiting` : ""}
      </span>`}
      ${gateway.value && html`<span class="head-version" title=${`up for ${duration(gateway.value.uptime_s)}`}>${gateway.value.version}</span>`}
      <span class=${`connection is-${connection.value}`} role="status"><i aria-hidden="true"></i><span>${CONNECTIONS[connection.value]}</span></span>
      <${ThemeButton} />
    </div>
  </header>`;
}

const THEMES = { "": "system", light: "light", dark: "dark" };

function ThemeButton() {
  const theme = useSignal(chosenTheme());
  const next = { "": "light", light: "dark", dark: "" }[theme.value];
  const choose = () => {
    chooseTheme(next);
    theme.value = next;
  };
  const label = `Theme: ${THEMES[theme.value]}. Change to ${THEMES[next]}`;
  return html`<button type="button" class="icon theme" onClick=${choose} aria-label=${label} title=${label}>
    <svg viewBox="0 0 16 16" aria-hidden="true">
      ${theme.value === "" && html`<circle cx="8" cy="8" r="5.2" class="line" /><path d="M8 2.8a5.2 5.2 0 0 1 0 10.4z" />`}
      ${theme.value === "light" && html`<circle cx="8" cy="8" r="3" /><path class="line" d="M8 1.4v1.8M8 12.8v1.8M1.4 8h1.8M12.8 8h1.8M3.3 3.3l1.3 1.3M11.4 11.4l1.3 1.3M3.3 12.7l1.3-1.3M11.4 4.6l1.3-1.3" />`}
      ${theme.value === "dark" && html`<path d="M12.9 9.9A5.6 5.6 0 0 1 6.1 3.1a5.6 5.6 0 1 0 6.8 6.8z" />`}
    </svg>
  </button>`;
}

function App() {
  const { view, id } = route.value;
  const found = VIEWS.find((each) => each.name === view);
  useEffect(followGateway, []);
  useEffect(() => {
    document.title = `${found?.title ?? "Not found"} · Parrot Gateway`;
    // Not all views fit into a phone's header. NOTE: `scrollIntoView` would move the start of Tab
    // there.
    const link = document.querySelector("nav [aria-current]");
    const nav = link?.parentElement;
    if (nav) nav.scrollLeft = link.offsetLeft - nav.offsetLeft - (nav.clientWidth - link.offsetWidth) / 2;
  }, [view]);
  return html`
    <${Head} current=${view} />
    <main id="content" tabindex=${found?.scrolls ? 0 : -1}>
      ${connection.value === "refused" && html`<${Empty} title="The gateway did not let this page in">
        <p>${refusal.value?.message}</p>
        <button type="button" class="primary" onClick=${() => location.reload()}>Try again</button>
      <//>`}
      ${connection.value !== "refused" && (found ? html`<${found.View} id=${id} />` : html`<${Empty} title="There is no such view"><a href=${hrefOf("sessions")}>Sessions</a><//>`)}
    </main>
    <${KeyDialog} />`;
}

render(html`<${App} />`, document.getElementById("app"));
