// Run one stream of npm `ai` with `@ai-sdk/openai`; see README.md in this folder for the argument and the output.
import { createOpenAI } from "@ai-sdk/openai";
import { streamText } from "ai";

const asked = JSON.parse(process.argv[2]);
const openai = createOpenAI({ baseURL: asked.url + "/v1", apiKey: "-" });
const model = asked.api === "responses" ? openai.responses("m") : asked.api === "chat" ? openai.chat("m") : openai.completion("m");
let text = "", error = "";
try {
  const timeout = asked.idle_s ? { timeout: { chunkMs: asked.idle_s * 1000 } } : {};
  const result = streamText({ model, prompt: asked.prompt, onError() {}, ...timeout });
  let finish = "";
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") text += part.text;
    if (part.type === "error") error = `${part.error?.constructor?.name}: ${part.error?.message ?? part.error}`;
    if (part.type === "abort") error = `abort: ${part.reason ?? ""}`;
    if (part.type === "finish") finish = part.finishReason;
  }
  if (!error && finish !== "stop") error = `finish reason ${finish}`;
} catch (raised) {
  error = `${raised.constructor.name}: ${raised.message}`;
}
console.log("RESULT " + JSON.stringify({ text, error }));
