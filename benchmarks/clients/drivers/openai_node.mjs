// Run one stream of npm `openai`; see README.md in this folder for the argument and the output.
import OpenAI from "openai";

const asked = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: asked.url + "/v1", apiKey: "-", ...(asked.idle_s ? { timeout: asked.idle_s * 1000 } : {}) });
let text = "", error = "";
try {
  if (asked.api === "chat") {
    const messages = [{ role: "user", content: asked.prompt }];
    for await (const chunk of await client.chat.completions.create({ model: "m", messages, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
  } else if (asked.api === "completions") {
    for await (const chunk of await client.completions.create({ model: "m", prompt: asked.prompt, stream: true }))
      text += chunk.choices[0]?.text ?? "";
  } else {
    for await (const event of await client.responses.create({ model: "m", input: asked.prompt, stream: true }))
      text += event.type === "response.output_text.delta" ? event.delta : "";
  }
} catch (raised) {
  error = `${raised.constructor.name}: ${raised.message}` + (raised.cause ? ` (${raised.cause.message})` : "");
}
console.log("RESULT " + JSON.stringify({ text, error }));
