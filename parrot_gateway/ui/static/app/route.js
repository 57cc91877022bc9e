/** The address behind #: `#/sessions/ID?call=…`. */

import { signal } from "../vendor/preact.js";

/** `{view, id, query}`. */
export const route = signal(read());

function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...rest] = path.split("/");
  let id = null;
  try {
    id = rest.length ? decodeURIComponent(rest.join("/")) : null;
  } catch {
    // A truncated percent sign: no session has such an id.
  }
  return { view: view || "sessions", id: id || null, query: new URLSearchParams(query) };
}

addEventListener("hashchange", () => (route.value = read()));

export function hrefOf(view, id = null, query = {}) {
  const search = new URLSearchParams(query).toString();
  return `#/${view}${id === null ? "" : `/${encodeURIComponent(id)}`}${search && `?${search}`}`;
}

/** Change the query without a step in the history. */
export function replaceQuery(query) {
  const { view, id } = route.peek();
  history.replaceState(null, "", hrefOf(view, id, query));
  route.value = read();
}
