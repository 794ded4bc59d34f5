/* Requests to the server. The API key stays in this tab (sessionStorage) and goes nowhere but into
 * the header of requests to the server that the page came from. */
const KEY = "baton-key";

export const key = () => sessionStorage.getItem(KEY) ?? "";
export function setKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  const all = new Headers(more);
  if (key()) all.set("Authorization", `Bearer ${key()}`);
  return all;
}

async function failed(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    /* not JSON: the status says it */
  }
  return new ApiError(response.status, message);
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new ApiError(0, "the server does not answer");
  }
  if (!response.ok) throw await failed(response);
  return response;
}

export async function get(path) {
  return (await request(path, { headers: headers() })).json();
}

/* Yields the JSON of each server-sent event of a generation. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    signal,
    headers: headers({ "Content-Type": "application/json", "x-baton-plan": "1" }),
    body: JSON.stringify(body),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.startsWith("data: ") ? event.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
