// Requests to the server of this page, with the API key, OpenAI's errors, and server-sent events.

const ROOT = new URL("../../", import.meta.url); // relative, for proxies with a path prefix
const STORED = "toka-console-key"; // sessionStorage is deleted with the tab

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

export async function request(path, { body, signal, method } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not respond.");
  }
  if (!answer.ok) throw new ApiError(answer.status, await problem(answer));
  return answer;
}

export const get = async (path, options) => (await request(path, options)).json();

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server responded with status ${answer.status}.`;
  }
}

// Yields the JSON objects of an event stream until [DONE]. Throws an error event.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code ?? 0, event.error.message);
      yield event;
    }
  }
}
