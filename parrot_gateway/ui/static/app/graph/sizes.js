/** Sizes of boxes, in units of the picture. */

export const CALL_SIZE = { width: 206, height: 54 };
const SIZES = {
  transform: { width: 168, height: 44 },
  variable: { width: 148, height: 36 },
};

export const sizeOf = (box) => SIZES[box.kind] ?? CALL_SIZE;
