/** The live graph of a session: nodes as elements, edges and frames on a canvas behind them. */

import { effect, html, useLayoutEffect, useMemo, useRef, useSignal } from "../../vendor/preact.js";
import { forget, onNextFrame } from "../data/frame.js";
import { stateAt } from "../data/session_graph.js";
import { plural } from "../format.js";
import { onThemeChange } from "../parts/palette.js";
import { Bitmap } from "./bitmap.js";
import { Camera } from "./camera.js";
import { criticalPath } from "./critical_path.js";
import { useGestures } from "./gestures.js";
import { Layout } from "./layout_client.js";
import { nextBox } from "./neighbours.js";
import { NodeBox } from "./node_box.js";
import { paint, TEXT_SCALE } from "./painter.js";
import { sizeOf } from "./sizes.js";

/** Maximum nodes shown as elements; others are marks on the canvas. */
const MAX_ELEMENTS = 260;
/** Elements created per frame; marks stand for the rest until later frames. */
const MAX_NEW_ELEMENTS = 64;
/**
 * While a picture with this many edges moves, it is repainted at this interval and shifted in
 * between.
 */
const MANY_EDGES = 150;
const MOVING_PAUSE_MS = 120;
/** Milliseconds after the last movement until the picture is drawn sharp. */
const STILL_MS = 150;
/** Graphs with this few boxes show a readable part rather than everything. */
const FEW_BOXES = 40;
/** Pixels around the pane within which nodes stay elements. */
const AROUND = 120;
const NOTHING = { nodes: new Set(), edges: new Set() };

/**
 * @param {object} props
 * @param {import("../data/session_graph.js").SessionGraph} props.graph
 * @param at signal: the replayed moment, null for now
 * @param selected signal: id of a box, or null
 * @param showsPath signal: the critical path is marked
 */
export function GraphView({ graph, at, selected, showsPath }) {
  const pane = useRef(null);
  const canvas = useRef(null);
  const world = useRef(null);
  const camera = useMemo(() => new Camera(), [graph]);
  const placed = useSignal(null);
  const elements = useSignal([]);
  const cursor = useSignal(null);
  const critical = useSignal(NOTHING);

  /** Fit the whole picture; until the user moves it, a small one is shown at readable size. */
  const fit = () => {
    const { width, height, at: places } = placed.peek() ?? {};
    if (places) camera.fit(width, height, places.size <= FEW_BOXES);
  };
  const fitAll = () => {
    camera.isFree = true;
    camera.fit(placed.value?.width ?? 0, placed.value?.height ?? 0);
  };

  // A layout effect ends before the canvas is gone; other effects end after the next frame.
  useLayoutEffect(() => {
    const layout = new Layout((result) => {
      placed.value = result;
      if (camera.isFree) fit();
    });
    const bitmap = new Bitmap();
    let still = 0;
    let drawn = null;
    const rest = () => {
      still = 0;
      pane.current?.classList.remove("is-moving");
      onNextFrame(draw);
    };
    const draw = () => {
      const { x, y, scale } = camera.view.value;
      if (world.current && drawn !== camera.view.value) {
        // While moving, elements are shifted as one picture without repainting.
        if (drawn) pane.current.classList.add("is-moving");
        clearTimeout(still);
        still = setTimeout(rest, STILL_MS);
        drawn = camera.view.value;
        pane.current.classList.toggle("is-far", scale < TEXT_SCALE);
        world.current.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
      }
      const picture = {
        graph,
        camera,
        placed: placed.value,
        at: at.value,
        selected: selected.value,
        near: selected.value,
        critical: critical.value,
      };
      const refresh = () => {
        const wanted = inView(graph, placed.value, camera, [cursor.value, selected.value]);
        if (!keep(elements, wanted)) onNextFrame(draw);
        paint(canvas.current, { ...picture, elements: elements.value });
      };
      const pause = still && graph.edges.length > MANY_EDGES ? MOVING_PAUSE_MS : 0;
      bitmap.show(canvas.current, camera.view.value, refresh, draw, pause);
    };
    const mark = () => (critical.value = showsPath.value ? criticalPath(graph) : NOTHING);
    const observer = new ResizeObserver(([{ contentRect }]) => {
      camera.resize(contentRect.width, contentRect.height);
      if (camera.isFree) fit();
      onNextFrame(draw);
    });
    observer.observe(pane.current);
    const ends = [
      effect(() => {
        graph.structure.value;
        const { clientWidth, clientHeight } = pane.current;
        layout.place(graph.boxes, graph.edges, { width: clientWidth, height: clientHeight });
      }),
      effect(() => {
        graph.revision.value, showsPath.value;
        onNextFrame(mark);
      }),
      effect(() => {
        camera.view.value, placed.value, graph.revision.value;
        at.value, selected.value, critical.value, cursor.value;
        onNextFrame(draw);
      }),
      onThemeChange(() => onNextFrame(draw)),
    ];
    return () => {
      for (const end of ends) end();
      forget(draw);
      forget(mark);
      observer.disconnect();
      clearTimeout(still);
      layout.close();
      bitmap.close();
    };
  }, [graph]);

  const boxAt = (id) => {
    const place = placed.value?.at.get(id);
    const box = place && graph.boxes.find((each) => each.id === id);
    return box ? { ...place, ...sizeOf(box) } : null;
  };
  const reveal = (id, minScale) => {
    const box = boxAt(id);
    if (box) camera.reveal(box, minScale);
  };
  const hit = (px, py) => boxUnder(graph, placed.value, camera, px, py);
  useGestures(pane, camera, { onPick: (id) => (selected.value = id), hit });

  /** Arrow keys go from node to node; the element exists in the next frame. */
  const onKeyDown = (event) => {
    const zooms = { "+": 1.25, "=": 1.25, "-": 0.8 };
    if (zooms[event.key]) camera.zoom(zooms[event.key]);
    else if (event.key === "0") fitAll();
    else if (event.key === "Enter" || event.key === " ") {
      selected.value = selected.value === cursor.value ? null : cursor.value;
    } else if (event.key === "Escape") selected.value = null;
    else {
      const next = nextBox(event.key, cursor.value, graph, placed.value);
      if (!next) return;
      cursor.value = next;
      reveal(next);
      if (selected.value !== null) selected.value = next;
      focusSoon(pane, next);
    }
    event.preventDefault();
  };

  graph.revision.value;
  const shown = elements.value;
  const first = cursor.value && graph.nodes.has(cursor.value) ? cursor.value : shown[0]?.id;
  const summary = plural(graph.nodes.size, "call");
  return html`<div class="graph" ref=${pane}>
    <canvas ref=${canvas} class="graph-canvas" aria-hidden="true"></canvas>
    <div
      class="graph-nodes"
      role="group"
      aria-label=${`Graph of ${summary}. Arrow keys go from call to call, Enter shows details.`}
      onKeyDown=${onKeyDown}
      onClick=${({ target, detail }) => {
        // A press by assistive technology; pointers go through gestures.
        const id = target.closest("[data-id]")?.dataset.id;
        if (detail === 0 && id) selected.value = id;
      }}
      onFocusIn=${({ target }) => {
        if (target.dataset?.id && target.dataset.id !== cursor.value) cursor.value = target.dataset.id;
      }}
    >
      <div class="graph-world" ref=${world}>
        ${shown.map(
          (box) => html`<${NodeBox}
            key=${box.id}
            node=${box}
            state=${stateAt(box, at.value)}
            x=${placed.value?.at.get(box.id)?.x ?? 0}
            y=${placed.value?.at.get(box.id)?.y ?? 0}
            at=${at.value}
            graph=${graph}
            isSelected=${selected.value === box.id}
            isCursor=${box.id === first}
            isCritical=${critical.value.nodes.has(box.id)}
          />`,
        )}
      </div>
    </div>
    ${graph.nodes.size === 0 && html`<p class="graph-empty">No call has been submitted yet.</p>`}
    <${Legend} graph=${graph} />
    <div class="graph-tools">
      <button type="button" onClick=${() => camera.zoom(1.3)} aria-label="Zoom in">+</button>
      <button type="button" onClick=${() => camera.zoom(0.77)} aria-label="Zoom out">−</button>
      <button type="button" onClick=${fitAll} aria-label="Fit the graph into view">Fit</button>
      <button
        type="button"
        aria-pressed=${showsPath.value ? "true" : "false"}
        onClick=${() => (showsPath.value = !showsPath.value)}
      >
        Critical path
      </button>
    </div>
  </div>`;
}

function Legend({ graph }) {
  graph.structure.value;
  const has = { declared: false, inferred: false };
  for (const edge of graph.edges) has[edge.inferred ? "inferred" : "declared"] = true;
  if (!has.declared && !has.inferred) return null;
  return html`<ul class="graph-legend">
    ${has.declared && html`<li><i class="line-declared"></i>variable</li>`}
    ${has.inferred && html`<li><i class="line-inferred"></i>inferred, with confidence</li>`}
    <li><i class="line-critical"></i>critical path</li>
    <li><i class="line-cached"></i>cached share of the prompt</li>
  </ul>`;
}

/** Boxes to show as elements: those in view, and those in `always`. */
function inView(graph, placed, camera, always) {
  if (!placed) return [];
  const { x, y, scale } = camera.view.value;
  const found = [];
  for (const box of graph.boxes) {
    const place = placed.at.get(box.id);
    if (!place) continue;
    const isAsked = always.includes(box.id);
    if (!isAsked && scale < TEXT_SCALE) continue;
    const { width, height } = sizeOf(box);
    const [left, top] = [place.x * scale + x, place.y * scale + y];
    const isSeen =
      left < camera.width + AROUND &&
      left + width * scale > -AROUND &&
      top < camera.height + AROUND &&
      top + height * scale > -AROUND;
    if (isAsked || (isSeen && found.length < MAX_ELEMENTS)) found.push(box);
  }
  // Something must be able to take the focus, even if all nodes are marks.
  if (!found.length && graph.boxes.length) found.push(graph.boxes[0]);
  return found;
}

/** Update a list of elements to the wanted ones; false if some are left for the next frame. */
function keep(list, wanted) {
  const now = list.value;
  const known = new Set(now.map((box) => box.id));
  let room = MAX_NEW_ELEMENTS;
  const next = wanted.filter((box) => known.has(box.id) || room-- > 0);
  if (now.length !== next.length || now.some((box, index) => box !== next[index])) list.value = next;
  return next.length === wanted.length;
}

function boxUnder(graph, placed, camera, px, py) {
  if (!placed) return null;
  const { x, y, scale } = camera.view.value;
  const [wx, wy] = [(px - x) / scale, (py - y) / scale];
  for (const box of graph.boxes) {
    const place = placed.at.get(box.id);
    if (!place) continue;
    const { width, height } = sizeOf(box);
    const isIn = wx >= place.x && wx <= place.x + width && wy >= place.y && wy <= place.y + height;
    if (isIn) return box.id;
  }
  return null;
}

function focusSoon(pane, id) {
  requestAnimationFrame(() =>
    requestAnimationFrame(() =>
      pane.current?.querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus({ preventScroll: true }),
    ),
  );
}
