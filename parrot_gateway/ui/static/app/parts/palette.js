/** The colours of the style sheet, for what is drawn on a canvas. */

const NAMES = [
  "surface", "raised", "line", "line-strong", "text", "muted", "accent", "focus",
  "waiting", "running", "done", "failed", "cancelled", "empty", "ready",
  "waiting-soft", "running-soft", "done-soft", "failed-soft", "cancelled-soft",
  "queue", "fill", "generate", "edge", "group", "critical",
];

let colours = null;
const listeners = new Set();

/** By name, as of `--NAME` in base.css. */
export function palette() {
  colours ??= resolved();
  return colours;
}

/** A canvas knows no `light-dark()`: an element tells what that comes to. */
function resolved() {
  const probe = document.documentElement.appendChild(document.createElement("i"));
  const colourOf = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(NAMES.map((name) => [name, colourOf(name)]));
  probe.remove();
  return found;
}

/** Be called after the theme has changed; returns what ends that. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  colours = null;
  for (const listener of listeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);

/** "light", "dark", or "" for that of the system. */
export function chosenTheme() {
  return document.documentElement.dataset.theme ?? "";
}

export function chooseTheme(theme) {
  if (theme) {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("parrot-theme", theme);
  } else {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("parrot-theme");
  }
  changed();
}

/** A canvas of a size in CSS pixels, sharp on dense screens, cleared; its 2D context. */
export function sharpContext(canvas, width, height) {
  const dense = Math.min(devicePixelRatio || 1, 2);
  const [w, h] = [Math.max(1, Math.round(width * dense)), Math.max(1, Math.round(height * dense))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(dense, 0, 0, dense, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
