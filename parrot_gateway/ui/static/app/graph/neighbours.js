/** Targets of the arrow keys in a graph. */

import { sizeOf } from "./sizes.js";

const DIRECTIONS = {
  ArrowRight: [1, 0],
  ArrowLeft: [-1, 0],
  ArrowDown: [0, 1],
  ArrowUp: [0, -1],
};
/** Distance aside counts this much more than distance ahead. */
const ASIDE = 2.5;

/**
 * Return the box that a key leads to: the nearest connected box in that direction, or else the
 * nearest of all; null for another key, or if there is none.
 */
export function nextBox(key, from, graph, placed) {
  if (!placed) return null;
  const boxes = graph.boxes.filter((box) => placed.at.has(box.id));
  if (key === "Home") return boxes[0]?.id ?? null;
  if (key === "End") return boxes.at(-1)?.id ?? null;
  const direction = DIRECTIONS[key];
  if (!direction) return null;
  if (!placed.at.has(from)) return boxes[0]?.id ?? null;
  const centre = (box) => {
    const { x, y } = placed.at.get(box.id);
    const { width, height } = sizeOf(box);
    return [x + width / 2, y + height / 2];
  };
  const [x, y] = centre(boxes.find((box) => box.id === from));
  const joined = new Set();
  for (const edge of graph.edges) {
    if (edge.from === from) joined.add(edge.to);
    if (edge.to === from) joined.add(edge.from);
  }
  const nearest = (candidates) => {
    let found = null;
    let least = Infinity;
    for (const box of candidates) {
      const [cx, cy] = centre(box);
      const along = (cx - x) * direction[0] + (cy - y) * direction[1];
      const aside = Math.abs((cx - x) * direction[1]) + Math.abs((cy - y) * direction[0]);
      if (box.id === from || along < 1) continue;
      if (along + ASIDE * aside < least) [found, least] = [box.id, along + ASIDE * aside];
    }
    return found;
  };
  return nearest(boxes.filter((box) => joined.has(box.id))) ?? nearest(boxes);
}
