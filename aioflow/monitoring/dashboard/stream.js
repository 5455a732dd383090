// Server-sent events, read with fetch: unlike an EventSource it can show a token.

import { authorization, BASE, RequestFailed } from "./store.js";

/** The events at `path` as {name, body}, until `signal` or the end. Throws RequestFailed where there are none. */
export async function* events(path, signal) {
  const response = await fetch(new URL(path, BASE), { headers: { Accept: "text/event-stream", ...authorization() }, cache: "no-store", signal });
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new RequestFailed(response.status, found?.errors?.join("; ") || `${response.status} ${response.statusText}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const fields = new Map(event.split("\n").map((line) => {
        const colon = line.indexOf(":");
        return [line.slice(0, colon), line.slice(colon + 1).trimStart()];
      }));
      if (fields.has("data")) yield { name: fields.get("event") ?? "message", body: JSON.parse(fields.get("data")) };
    }
  }
}
