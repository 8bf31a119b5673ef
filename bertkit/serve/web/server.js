// Requests to the server that this page came from, and what it says when it refuses.

const TOKEN = "bertkit token";

/** A refusal, or no answer at all; its message is for the reader. */
export class Refusal extends Error {
  /**
   * @param {string} message
   * @param {number} status of the answer; 0 where there was none.
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** @param {string} token that requests carry from now on, in this tab; none where empty. */
export function useToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/**
 * @param {string} path relative to this page, so that it also works below a proxy's folder.
 * @param {object} [body] sent as JSON by POST; GET where absent.
 * @returns {Promise<any>} the answer's JSON.
 * @throws {Refusal}
 */
export async function request(path, body) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.authorization = `Bearer ${token}`;
  const options = {headers};
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(options, {method: "POST", body: JSON.stringify(body)});
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Refusal("The server cannot be reached. Is it still running?", 0);
  }
  const found = await answer.json().catch(() => null);
  if (answer.ok && found !== null) return found;
  const wait = answer.headers.get("retry-after");
  const later = wait ? ` Try again in ${wait} s.` : "";
  const message = found?.error?.message ?? `The answer was no JSON (status ${answer.status}).`;
  throw new Refusal(message + later, answer.status);
}

/**
 * @param {string} text in base64.
 * @returns {Uint8Array}
 */
export const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
