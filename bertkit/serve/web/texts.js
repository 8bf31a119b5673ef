// Texts: the mask, lines, and character offsets.

export const MASK = "[MASK]";

/** @returns {string[]} the lines that are not blank. */
export const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/**
 * Make a function that slices a text by the server's characters: JavaScript counts an emoji as two.
 * @param {string} text
 * @returns {(start: number, end?: number) => string}
 */
export function slicer(text) {
  const characters = [...text];
  return (start, end) => characters.slice(start, end).join("");
}
