// Requests to the server of this page, and its error messages.

const TOKEN = "bertkit token";

/** An error response, or no response at all; the message is shown to the user. */
export class Refusal extends Error {
  /**
   * @param {string} message
   * @param {number} status the HTTP status; 0 if there was no response.
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** @param {string} token the token for all later requests of this tab; "" for no token. */
export function useToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/**
 * @param {string} path a path relative to this page, so that it also works behind a proxy's prefix.
 * @param {object} [body] the body, sent as JSON by POST; without a body, the method is GET.
 * @returns {Promise<any>} the response's JSON.
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
  const message = found?.error?.message ?? `The response was not JSON (status ${answer.status}).`;
  throw new Refusal(message + later, answer.status);
}

/**
 * @param {string} text bytes in base64.
 * @returns {Uint8Array}
 */
export const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
