/** Requests to the gateway, with the key that the user has typed, where one is needed. */

import { signal } from "../../vendor/preact.js";

/** What the key dialog asks for: `{kind, message, settle}`, or null. */
export const keyRequest = signal(null);

/**
 * What keys are for: `view` reads what the page shows, `admin` acts on engines, `calls` runs calls.
 * They are kept for the tab alone and never stand in an address.
 */
const storageName = (kind) => `parrot-key-${kind}`;

const keyFor = (kind) =>
  sessionStorage.getItem(storageName(kind)) ?? sessionStorage.getItem(storageName("view"));

/** The gateway's own address: the page is one folder below it, also behind a proxy's prefix. */
export const GATEWAY = new URL("..", document.baseURI).href.replace(/\/$/, "");

let asking = null;

/** Ask once, however many requests have been refused; true if a key was given. */
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

/** The error of an answer, from the body that all routes share. */
async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not JSON: a proxy in between.
  }
  const message = error.message ?? `The gateway answered with status ${response.status}.`;
  return new ApiError(response.status, message, error.code ?? "");
}

/** Statuses that another key can change; a 403 that names a page or a switched-off route is none. */
const wantsKey = (error) =>
  error.status === 401 || (error.status === 403 && /key/.test(error.code) && error.code !== "");

/**
 * Fetch with the key, asking for one where it is missing or wrong.
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
    // Where none was sent, none was wrong.
    if (!(await askForKey(kind, key ? error.message : ""))) throw error;
  }
}

/** A JSON answer; `body` is sent as JSON. */
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
