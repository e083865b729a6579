// Asking the server. The API key, where one is needed, is kept for as long as the tab is open, and in no other place.

const KEY = "tllm-api-key";

/** The server's refusal of a request, with its status; 401 where the key is missing or wrong. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Nobody answers: the server is gone, or the network to it. */
export class NoAnswer extends Error {}

export const keepKey = (key) => sessionStorage.setItem(KEY, key);

/** A GET that answers JSON. */
export async function get(path) {
  const reply = await fetch(path, { headers: headers(), cache: "no-store" }).catch(() => {
    throw new NoAnswer();
  });
  if (!reply.ok) throw await refusal(reply);
  return reply.json().catch(() => {
    throw new NoAnswer(); // it went away in the middle
  });
}

/** The events of a POST that answers as a stream, each decoded; `signal` ends it. */
export async function* stream(path, body, signal) {
  const reply = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  }).catch(unless(signal, "The server does not answer. Send it again once it does."));
  if (!reply.ok) throw await refusal(reply);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(unless(signal, "The connection to the server broke."));
    if (done) throw new Error("the stream ended before its end");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const decoded = JSON.parse(data);
      if (decoded.error) throw new Refusal(decoded.error.code, decoded.error.message);
      yield decoded;
    }
  }
}

/** Throws `NoAnswer` with these words in the place of the browser's own, unless the user has stopped the reply. */
const unless = (signal, words) => (error) => {
  throw signal.aborted ? error : new NoAnswer(words);
};

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refusal(reply) {
  const text = await reply.text();
  try {
    return new Refusal(reply.status, JSON.parse(text).error.message);
  } catch {
    return new Refusal(reply.status, `the server answered ${reply.status}`);
  }
}
