/** The style sheet's colours, for drawing on a canvas. */

const NAMES = [
  "surface", "raised", "line", "line-strong", "text", "muted", "accent", "focus",
  "waiting", "running", "done", "failed", "cancelled", "empty", "ready",
  "waiting-soft", "running-soft", "done-soft", "failed-soft", "cancelled-soft",
  "queue", "fill", "generate", "edge", "group", "critical",
];

let colours = null;
const listeners = new Set();

/** Colours by name, from `--NAME` in base.css. */
export function palette() {
  colours ??= resolved();
  return colours;
}

/** A canvas cannot read `light-dark()`, so an element resolves the colours. */
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

/** Call `listener` after theme changes; returns a function that ends this. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  colours = null;
  for (const listener of listeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);

/** "light", "dark", or "" for the system's theme. */
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

/** Size a canvas in CSS pixels, sharp on dense screens; returns its cleared 2D context. */
export function sharpContext(canvas, width, height) {
  const dense = Math.min(devicePixelRatio || 1, 2);
  const [w, h] = [Math.max(1, Math.round(width * dense)), Math.max(1, Math.round(height * dense))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(dense, 0, 0, dense, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
