// Texts: the mask, lines, and places in them.

export const MASK = "[MASK]";

/** @returns {string[]} the lines that are not blank. */
export const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/**
 * A text by characters, as the server counts them: JavaScript counts an emoji as two.
 * @param {string} text
 * @returns {(start: number, end?: number) => string}
 */
export function slicer(text) {
  const characters = [...text];
  return (start, end) => characters.slice(start, end).join("");
}
