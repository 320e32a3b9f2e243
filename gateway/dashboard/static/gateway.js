// Talks to the gateway. The admin key is kept in this tab and sent as a header with each call: there is no cookie that
// another site could make the browser send.

const KEPT = "kvgate.admin-key";
const LIMIT_MS = 20000;

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const session = {
  get key() {
    return sessionStorage.getItem(KEPT);
  },
  open(key) {
    sessionStorage.setItem(KEPT, key);
  },
  close() {
    sessionStorage.removeItem(KEPT);
  },
};

export async function call(method, path, { body, key = session.key, headers = {} } = {}) {
  const sent = { ...headers };
  if (key && path.startsWith("/admin/")) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
      signal: AbortSignal.timeout(LIMIT_MS),
    });
  } catch (error) {
    const why = error.name === "TimeoutError" ? `it did not answer within ${LIMIT_MS / 1000} s` : "it can't be reached";
    throw new Refusal(`The gateway does not answer: ${why}.`, 0);
  }
  const text = await answer.text();
  let said = null;
  try {
    said = text ? JSON.parse(text) : null;
  } catch {
    throw new Refusal(`The gateway answered ${answer.status} with something that is not JSON.`, answer.status);
  }
  if (!answer.ok) throw new Refusal(said?.error?.message ?? `The gateway answered ${answer.status}.`, answer.status);
  return said;
}

export const admin = (method, path, options) => call(method, `/admin/v1${path}`, options);
