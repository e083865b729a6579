// A chat with the model. Models without a chat template continue what is written instead.

import { count, seconds } from "./amounts.js";
import { element, find, replace } from "./dom.js";
import { get, stream } from "./server.js";

export class Chat {
  constructor() {
    this.messages = [];
    this.running = null; // the AbortController of the reply that is being written
    this.hasTemplate = null; // not known yet
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    find("stop").addEventListener("click", () => this.running?.abort());
    find("clear").addEventListener("click", () => this.clear());
    find("settings").addEventListener("toggle", () => listModels());
  }

  /** Find out which kind of conversation the model can have. */
  async look() {
    if (this.hasTemplate !== null) return;
    const info = await get("/tokenizer_info").catch((error) => {
      if (error.status !== 400) throw error;
      return { fault: error.message }; // a model without a tokenizer
    });
    this.hasTemplate = Boolean(info.chat_template);
    find("chat-kind").textContent = info.fault
      ? info.fault
      : this.hasTemplate
        ? ""
        : "This model has no chat template: it continues the text that you write.";
    find("send").disabled = Boolean(info.fault);
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    replace(find("messages"));
    find("message").focus();
  }

  async send() {
    const text = find("message").value;
    if (!text.trim() || this.running || this.hasTemplate === null) return;
    find("message").value = "";
    const messages = this.messages; // a new chat that begins meanwhile has others
    messages.push({ role: "user", content: text });
    show("user").append(...paragraphs(text));
    const item = show("assistant");
    this.running = new AbortController();
    this.working(true);
    const reply = { text: "", thinking: "", usage: null, began: performance.now(), first: null };
    let isAnswered = true;
    try {
      for await (const chunk of stream(...this.request(), this.running.signal)) {
        take(chunk, reply);
        draw(item, reply);
      }
    } catch (error) {
      isAnswered = reply.text !== "";
      if (error.name !== "AbortError") item.append(element("p", { class: "fault" }, error.message));
    } finally {
      if (isAnswered) messages.push({ role: "assistant", content: reply.text });
      else messages.pop(); // what nobody answered, as it is too long perhaps, is not sent once more
      item.append(element("p", { class: "quiet" }, summary(reply)));
      this.running = null;
      this.working(false);
    }
  }

  /** The path and the body of the next request. */
  request() {
    const temperature = find("temperature").value;
    const limit = find("max-tokens").value;
    const options = { stream_options: { include_usage: true } };
    if (find("model").value) options.model = find("model").value;
    if (temperature) options.temperature = Number(temperature);
    if (limit) options.max_tokens = Number(limit);
    if (!this.hasTemplate) {
      const prompt = this.messages.map((message) => message.content).join("");
      return ["/v1/completions", { ...options, max_tokens: options.max_tokens ?? 256, prompt }];
    }
    const system = find("system").value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    return ["/v1/chat/completions", { ...options, messages }];
  }

  /** Of the two buttons the one that is shown has the keyboard, if the other had it. Who has the messages read aloud
   * hears a reply once it is whole. */
  working(isWorking) {
    const [shown, gone] = (isWorking ? ["stop", "send"] : ["send", "stop"]).map(find);
    const hasKeyboard = document.activeElement === gone;
    gone.hidden = true;
    shown.hidden = false;
    if (hasKeyboard) shown.focus();
    find("messages").setAttribute("aria-busy", isWorking);
  }
}

/** Offer the model and its adapters, where it has any: they come and go while the server runs. */
async function listModels() {
  const { data } = await get("/v1/models").catch(() => ({ data: [] })); // the page says what is wrong
  const chosen = find("model").value;
  const option = ({ id }) => element("option", id === chosen ? { selected: "" } : {}, id);
  replace(find("model"), data.map(option));
  find("model").parentElement.hidden = data.length < 2;
}

function show(role) {
  const item = element("li", { class: role });
  find("messages").append(item);
  scrollToEnd();
  return item;
}

const scrollToEnd = () => window.scrollTo(0, document.body.scrollHeight);

function take(chunk, reply) {
  if (chunk.usage) reply.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const text = choice.text ?? choice.delta.content ?? "";
  const thinking = choice.delta?.reasoning_content ?? "";
  if ((text || thinking) && reply.first === null) reply.first = performance.now();
  reply.text += text;
  reply.thinking += thinking;
}

function draw(item, reply) {
  const follows = window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
  const thinking = reply.thinking ? element("p", { class: "thinking" }, reply.thinking) : null;
  replace(item, thinking, paragraphs(reply.text));
  if (follows) scrollToEnd();
}

/** Text as it is, with what stands between lines of three backticks as code. */
function paragraphs(text) {
  return text
    .split(/^```[^\n]*\n?/m)
    .map((part, at) => (part ? (at % 2 ? element("pre", {}, part) : element("div", { class: "text" }, part)) : null))
    .filter((part) => part !== null);
}

function summary(reply) {
  const now = performance.now();
  if (reply.first === null) return "no token came";
  const words = [`first token after ${seconds((reply.first - reply.began) / 1000)}`];
  const tokens = reply.usage?.completion_tokens;
  if (tokens > 1) words.push(`${count(((tokens - 1) * 1000) / (now - reply.first))} tokens/s`, `${tokens} tokens`);
  const cached = reply.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) words.push(`${cached} of ${reply.usage.prompt_tokens} prompt tokens were in the cache`);
  return words.join(" · ");
}
