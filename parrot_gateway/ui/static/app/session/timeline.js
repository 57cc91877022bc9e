/** A session's calls over time, one lane per engine, and the scrubber that replays them. */

import { effect, html, useEffect, useLayoutEffect, useRef, useSignal } from "../../vendor/preact.js";
import { forget, onNextFrame } from "../data/frame.js";
import { duration, engineName } from "../format.js";
import { criticalPath } from "../graph/critical_path.js";
import { tick } from "../parts/clock.js";
import { onThemeChange } from "../parts/palette.js";
import { lanesOf } from "./lanes.js";
import { barUnder, LABEL_WIDTH, measure, paintTimeline, RIGHT_PAD } from "./timeline_painter.js";

const NO_PATH = { nodes: new Set() };

/**
 * Properties as in GraphView, and:
 *
 * @param [props.span] signal: minimum seconds shown across the width
 * @param {boolean} [props.hasScrubber]
 */
export function Timeline({ graph, at, selected, showsPath, span, hasScrubber = true }) {
  const pane = useRef(null);
  const canvas = useRef(null);
  const hovered = useSignal(null);
  const bars = useRef([]);

  // A layout effect ends before the canvas is gone; other effects end after the next frame.
  useLayoutEffect(() => {
    let most = 0;
    const draw = () => {
      const { clientWidth: width, clientHeight: height } = pane.current;
      const now = graph.now;
      const plan = lanesOf(graph, now);
      // The pane is as high as its lanes need, if there is room, and does not shrink meanwhile.
      const natural = Math.max(measure(plan, Infinity).total, most);
      if (natural !== most) pane.current.style.setProperty("--lanes-height", `${(most = natural)}px`);
      const drawing = { graph, plan, width, height, span: Math.max(now, span?.value ?? 0, 1e-3), now };
      canvas.current.style.height = `${Math.max(height, measure(plan, height).total)}px`;
      bars.current = paintTimeline(canvas.current, {
        ...drawing,
        at: at.value,
        selected: selected.value,
        hovered: hovered.value?.node.id ?? null,
        critical: showsPath.value ? criticalPath(graph) : NO_PATH,
      });
    };
    const observer = new ResizeObserver(() => onNextFrame(draw));
    observer.observe(pane.current);
    const ends = [
      effect(() => {
        graph.revision.value, at.value, selected.value, hovered.value, showsPath.value, span?.value;
        onNextFrame(draw);
      }),
      effect(() => {
        tick.value;
        if (at.peek() === null && graph.isRunning) onNextFrame(draw);
      }),
      onThemeChange(() => onNextFrame(draw)),
    ];
    return () => {
      for (const end of ends) end();
      forget(draw);
      observer.disconnect();
    };
  }, [graph]);

  const place = (event) => {
    const { left, top } = canvas.current.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  const onMove = (event) => {
    const node = barUnder(bars.current, ...place(event));
    const { left, top } = pane.current.getBoundingClientRect();
    const next = node && { node, x: event.clientX - left, y: event.clientY - top };
    if (next || hovered.value) hovered.value = next;
  };
  return html`<div class="timeline">
    <${Legend} />
    <div
      class="timeline-pane"
      ref=${pane}
      tabindex="0"
      role="region"
      aria-label="Timeline of the calls, a lane for each engine; the graph has the same calls"
      onPointerMove=${onMove}
      onPointerLeave=${() => (hovered.value = null)}
      onClick=${(event) => (selected.value = barUnder(bars.current, ...place(event))?.id ?? null)}
    >
      <canvas ref=${canvas} class="timeline-canvas" aria-hidden="true"></canvas>
      <${Hover} hovered=${hovered} pane=${pane} />
    </div>
    ${hasScrubber && html`<${Scrubber} ...${{ graph, at }} />`}
  </div>`;
}

const Legend = () => html`<div class="timeline-head">
  <h2>Timeline</h2>
  <ul>
    <li><i class="part-queue"></i>queue</li>
    <li><i class="part-fill"></i>fill</li>
    <li><i class="part-generate"></i>generate</li>
  </ul>
</div>`;

function Hover({ hovered, pane }) {
  if (!hovered.value) return null;
  const { node, x, y } = hovered.value;
  const isRight = x > pane.current.clientWidth - 240;
  const style = {
    transform: `translate(${isRight ? x - 232 : x + 14}px, ${y + pane.current.scrollTop + 14}px)`,
  };
  const ran = node.started_s === null ? null : (node.finished_s ?? null) && node.finished_s - node.started_s;
  return html`<div class="hover" style=${style} aria-hidden="true">
    <b>${node.name}</b>
    <span>${node.state}${ran ? ` · ${duration(ran)}` : ""}${node.engine ? ` · ${engineName(node.engine)}` : ""}</span>
  </div>`;
}

const SPEEDS = [0.25, 1, 4, 16];
/** The default speed replays a session within this time, if one of the speeds does. */
const LONGEST_REPLAY_S = 20;

function Scrubber({ graph, at }) {
  const isPlaying = useSignal(false);
  const speed = useSignal(null);
  graph.revision.value;
  const end = Math.max(graph.end, 1e-3);
  const chosen = speed.value ?? SPEEDS.find((each) => end / each <= LONGEST_REPLAY_S && each >= 1) ?? 16;

  useEffect(() => {
    if (!isPlaying.value) return undefined;
    let last = performance.now();
    let frame = requestAnimationFrame(function step(time) {
      const moved = (at.peek() ?? 0) + ((time - last) / 1000) * chosen;
      last = time;
      at.value = Math.min(moved, graph.end);
      if (moved < graph.end) frame = requestAnimationFrame(step);
      else isPlaying.value = false;
    });
    return () => cancelAnimationFrame(frame);
  }, [isPlaying.value, chosen, graph]);

  const play = () => {
    if (!isPlaying.value && (at.value === null || at.value >= end)) at.value = 0;
    isPlaying.value = !isPlaying.value;
  };
  const live = () => {
    isPlaying.value = false;
    at.value = null;
  };
  return html`<div class="scrubber">
    <div class="scrubber-buttons" style=${{ width: `${LABEL_WIDTH - 8}px` }}>
      <button type="button" class="icon" onClick=${play} aria-label=${isPlaying.value ? "Pause the replay" : "Replay"}>
        ${isPlaying.value ? html`<${PauseIcon} />` : html`<${PlayIcon} />`}
      </button>
      <select
        aria-label="Speed of the replay"
        value=${String(chosen)}
        onChange=${(event) => (speed.value = Number(event.target.value))}
      >
        ${SPEEDS.map((each) => html`<option key=${each} value=${String(each)}>${each}×</option>`)}
      </select>
    </div>
    <input
      type="range"
      min="0"
      max=${end}
      step=${end / 1000}
      value=${at.value ?? end}
      aria-label="Moment that is shown"
      aria-valuetext=${at.value === null ? "now" : duration(at.value)}
      onInput=${(event) => (at.value = Number(event.target.value))}
    />
    <output class="scrubber-time">${at.value === null ? duration(end) : duration(at.value)}</output>
    <button type="button" class="live" aria-pressed=${at.value === null ? "true" : "false"} onClick=${live} style=${{ marginRight: `${RIGHT_PAD - 4}px` }}>
      ${graph.isClosed ? "End" : "Live"}
    </button>
  </div>`;
}

const PlayIcon = () => html`<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M4.5 2.8v10.4L13 8z" /></svg>`;
const PauseIcon = () => html`<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M4 3h3v10H4zM9 3h3v10H9z" /></svg>`;
