// Run one stream of npm `@anthropic-ai/sdk`; see README.md in this folder for the argument and the output.
import Anthropic from "@anthropic-ai/sdk";

const asked = JSON.parse(process.argv[2]);
const client = new Anthropic({ baseURL: asked.url, apiKey: "-", ...(asked.idle_s ? { timeout: asked.idle_s * 1000 } : {}) });
let text = "", error = "";
try {
  const messages = [{ role: "user", content: asked.prompt }];
  const stream = client.messages.stream({ model: "m", max_tokens: 64, messages });
  stream.on("text", (part) => (text += part));
  await stream.finalMessage();
} catch (raised) {
  error = `${raised.constructor.name}: ${raised.message}` + (raised.cause ? ` (${raised.cause.message})` : "");
}
console.log("RESULT " + JSON.stringify({ text, error }));
