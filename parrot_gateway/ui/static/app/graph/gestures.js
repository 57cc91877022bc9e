/** Drag to move, wheel or pinch to scale, click to select. */

import { useLayoutEffect } from "../../vendor/preact.js";

/** Pixels that a pointer may move during a click. */
const CLICK_SLACK = 4;

/**
 * @param pane ref of the element
 * @param {import("./camera.js").Camera} camera
 * @param {object} on
 * @param {(id: string | null) => void} on.onPick
 * @param {(x: number, y: number) => string | null} on.hit the box under a point of the pane
 */
export function useGestures(pane, camera, { onPick, hit }) {
  useLayoutEffect(() => {
    const element = pane.current;
    const pointers = new Map();
    let moved = 0;
    const local = ({ clientX, clientY }) => {
      const { left, top } = element.getBoundingClientRect();
      return { x: clientX - left, y: clientY - top };
    };
    const isTool = (event) => event.target.closest("button") !== null;
    const spread = () => {
      const [a, b] = [...pointers.values()];
      return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, size: Math.hypot(a.x - b.x, a.y - b.y) };
    };
    const onDown = (event) => {
      if (isTool(event) || event.button > 0) return;
      pointers.set(event.pointerId, local(event));
      if (pointers.size === 1) moved = 0;
    };
    const onMove = (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const pinch = pointers.size === 2 ? spread() : null;
      const now = local(event);
      pointers.set(event.pointerId, now);
      moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
      if (moved <= CLICK_SLACK) return;
      if (!element.hasPointerCapture(event.pointerId)) element.setPointerCapture(event.pointerId);
      if (pinch) {
        const after = spread();
        camera.zoom(after.size / Math.max(1, pinch.size), after.x, after.y);
        camera.pan(after.x - pinch.x, after.y - pinch.y);
      } else if (pointers.size === 1) camera.pan(now.x - before.x, now.y - before.y);
    };
    const onUp = (event) => {
      if (!pointers.delete(event.pointerId) || moved > CLICK_SLACK || event.type !== "pointerup") return;
      const { x, y } = local(event);
      onPick(hit(x, y));
    };
    const onWheel = (event) => {
      event.preventDefault();
      const { x, y } = local(event);
      const step = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
      if (event.shiftKey) camera.pan(-step, 0);
      else camera.zoom(Math.exp(-step * (event.ctrlKey ? 0.01 : 0.0016)), x, y);
    };
    const listeners = { pointerdown: onDown, pointermove: onMove, pointerup: onUp, pointercancel: onUp };
    for (const [name, listener] of Object.entries(listeners)) element.addEventListener(name, listener);
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => {
      for (const [name, listener] of Object.entries(listeners)) element.removeEventListener(name, listener);
      element.removeEventListener("wheel", onWheel);
    };
  }, [camera]);
}
