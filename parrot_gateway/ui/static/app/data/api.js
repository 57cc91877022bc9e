/** Requests to the gateway, with the key that the user typed if one is needed. */

import { signal } from "../../vendor/preact.js";

/** The open request of the key dialog: `{kind, message, settle}`, or null. */
export const keyRequest = signal(null);

/**
 * Storage names by kind of key: `view` reads the page's data, `admin` acts on engines, `calls` runs
 * calls. Keys are kept in this tab only and never in an address.
 */
const storageName = (kind) => `parrot-key-${kind}`;

const keyFor = (kind) =>
  sessionStorage.getItem(storageName(kind)) ?? sessionStorage.getItem(storageName("view"));

/** The gateway's own address: one folder above the page, also behind a proxy's prefix. */
export const GATEWAY = new URL("..", document.baseURI).href.replace(/\/$/, "");

let asking = null;

/** Ask once, however many requests were refused; true if a key was given. */
function askForKey(kind, message) {
  asking ??= new Promise((resolve) => {
    keyRequest.value = {
      kind,
      message,
      settle(key) {
        if (key) sessionStorage.setItem(storageName(kind), key);
        keyRequest.value = null;
        asking = null;
        resolve(Boolean(key));
      },
    };
  });
  return asking;
}

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Read an answer's error from the body that all routes share. */
async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // The body is not JSON; a proxy sent it.
  }
  const message = error.message ?? `The gateway answered with status ${response.status}.`;
  return new ApiError(response.status, message, error.code ?? "");
}

/** True for errors that another key can resolve; not for a 403 about a page or a disabled route. */
const wantsKey = (error) =>
  error.status === 401 || (error.status === 403 && /key/.test(error.code) && error.code !== "");

/**
 * Fetch with the key; ask for one if it is missing or wrong.
 *
 * @param {string} path of the gateway, from its /
 * @param {RequestInit & {kind?: "view" | "admin" | "calls"}} options
 * @returns {Promise<Response>} with a status below 400
 * @throws {ApiError}
 */
export async function request(path, { kind = "view", headers = {}, ...options } = {}) {
  for (;;) {
    const key = keyFor(kind);
    const authorization = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch(GATEWAY + path, {
      cache: "no-store",
      credentials: "omit",
      ...options,
      headers: { ...headers, ...authorization },
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (!wantsKey(error) || options.signal?.aborted) throw error;
    // If no key was sent, none was wrong.
    if (!(await askForKey(kind, key ? error.message : ""))) throw error;
  }
}

/** Fetch a JSON answer; `body` is sent as JSON. */
export async function requestJson(path, { body, headers = {}, ...options } = {}) {
  const sent =
    body === undefined
      ? { headers }
      : {
          method: "POST",
          headers: { "content-type": "application/json", ...headers },
          body: JSON.stringify(body),
        };
  return (await request(path, { ...options, ...sent })).json();
}
