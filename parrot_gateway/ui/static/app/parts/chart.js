/** A small live chart of the last minutes. */

import { effect, html, useLayoutEffect, useRef } from "../../vendor/preact.js";
import uPlot from "../../vendor/uplot.js";
import { forget, onNextFrame } from "../data/frame.js";
import { historyChanged } from "../data/overview.js";
import { onThemeChange, palette } from "./palette.js";

const HEIGHT = 92;

/**
 * @param {object} props
 * @param {string} props.title with the unit
 * @param {{name: string, colour: string, scale?: number}[]} props.series fields of `history`, and
 *   their factors
 * @param {object} props.history as in overview.js
 * @param {number} [props.most] the top of the scale, if known
 * @param {string} props.label for screen readers
 */
export function Chart({ title, series, history, most, label }) {
  const pane = useRef(null);
  useLayoutEffect(() => {
    let plot = null;
    const data = () => [
      history.at,
      ...series.map(({ name, scale = 1 }) => history[name].map((v) => (v === null ? null : v * scale))),
    ];
    const update = () => plot?.setData(data());
    const build = () => {
      plot?.destroy();
      plot = new uPlot(options(pane.current.clientWidth, series, most), data(), pane.current);
    };
    // Charts out of view are not drawn.
    const seen = new IntersectionObserver(([{ isIntersecting }]) => {
      if (isIntersecting && !plot) build();
      if (!isIntersecting && plot) plot = void plot.destroy();
    });
    const sized = new ResizeObserver(([{ contentRect }]) => plot?.setSize({ width: contentRect.width, height: HEIGHT }));
    seen.observe(pane.current);
    sized.observe(pane.current);
    const ends = [
      onThemeChange(() => plot && build()),
      effect(() => {
        historyChanged.value;
        onNextFrame(update);
      }),
    ];
    return () => {
      for (const end of ends) end();
      forget(update);
      seen.disconnect();
      sized.disconnect();
      plot?.destroy();
    };
  }, [history]);
  return html`<figure class="chart">
    <figcaption>${title}${series.length > 1 && series.map(({ name, colour, text }) => html`<span key=${name}><i class=${`colour-${colour}`}></i>${text}</span>`)}</figcaption>
    <div ref=${pane} role="img" aria-label=${label} class="chart-pane"></div>
  </figure>`;
}

function options(width, series, most) {
  const colours = palette();
  const axis = { stroke: colours.muted, font: "10.5px system-ui, sans-serif", ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [6, 4, 0, 0],
    scales: {
      x: { time: false, range: lastMinutes },
      y: { range: (_, low, high) => [0, Math.max(most ?? 0, high ?? 0) * (most ? 1 : 1.15) || 1] },
    },
    axes: [
      {
        ...axis,
        size: 18,
        gap: 2,
        grid: { show: false },
        splits: (_, __, low, high) => {
          const step = high - low > 130 ? 60 : high - low > 70 ? 30 : 15;
          const ticks = [];
          // The scale has no ends at first.
          for (let n = 1; n <= 8 && high - n * step > low; n += 1) ticks.unshift(high - n * step);
          return ticks;
        },
        values: (plot, ticks) => ticks.map((tick) => ago(plot.scales.x.max - tick)),
      },
      {
        ...axis,
        size: 34,
        gap: 4,
        space: 26,
        grid: { stroke: colours.line, width: 1 },
        values: (_, ticks) => ticks.map((tick) => (tick >= 10_000 ? `${tick / 1000}k` : String(+tick.toFixed(3)))),
      },
    ],
    series: [
      {},
      ...series.map(({ colour }, index) => ({
        stroke: colours[colour],
        width: 1.6,
        fill: index === 0 ? `color-mix(in srgb, ${colours[colour]} 14%, transparent)` : undefined,
        points: { show: false },
      })),
    ],
  };
}

/** At least a minute, up to the newest point. With a single point uPlot's own range is empty. */
function lastMinutes({ data: [at] }) {
  const end = at.at(-1) ?? 0;
  return [Math.min(at[0] ?? end, end - 60), end];
}

const ago = (seconds) => (seconds < 1 ? "now" : seconds < 90 ? `-${Math.round(seconds)} s` : `-${+(seconds / 60).toFixed(1)} min`);
