// The npm package `ai` with @ai-sdk/openai-compatible: generateText, streamText with usage, completions, errors.

import { createRequire } from "node:module";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

function equal(seen, wanted, what) {
  const [left, right] = [JSON.stringify(seen), JSON.stringify(wanted)];
  if (left !== right) {
    console.error(`DEVIATION: ${what} is ${left}, not ${right}`);
    process.exit(1);
  }
}

function expect(claim, message, seen) {
  equal(Boolean(claim), true, `${message} (${JSON.stringify(seen)})`);
}

const [url, model] = process.argv.slice(2);
const engine = createOpenAICompatible({ name: "engine", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const common = { maxOutputTokens: 12, temperature: 0, maxRetries: 0, system: "be brief", prompt: "hi" };

const whole = await generateText({ model: engine(model), ...common });
expect(["stop", "length"].includes(whole.finishReason), "finishReason", whole.finishReason);
expect(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0, "usage", whole.usage);
equal(whole.usage.totalTokens, whole.usage.inputTokens + whole.usage.outputTokens, "totalTokens");

async function streamed(asked) {
  const faults = [];
  const told = streamText({ ...asked, onError: ({ error }) => faults.push(String(error)) });
  const parts = [];
  for await (const part of told.textStream) parts.push(part);
  equal(faults, [], "faults of a stream");
  return { parts, usage: await told.usage, finishReason: await told.finishReason };
}

const stream = await streamed({ model: engine(model), ...common });
equal(stream.parts.join(""), whole.text, "streamed text");
expect(stream.parts.length > 1, "the stream came at once", stream.parts);
equal(stream.finishReason, whole.finishReason, "streamed finishReason");
for (const name of ["inputTokens", "outputTokens", "totalTokens"])
  equal(stream.usage[name], whole.usage[name], `streamed ${name}`);

const plain = { maxOutputTokens: 6, temperature: 0, maxRetries: 0, prompt: "ab 12" };
const completed = await generateText({ model: engine.completionModel(model), ...plain });
const completing = await streamed({ model: engine.completionModel(model), ...plain });
equal(completing.parts.join(""), completed.text, "streamed completion");
equal(completing.usage.outputTokens, completed.usage.outputTokens, "streamed outputTokens of a completion");

let raised;
try {
  await generateText({ model: engine("nope"), ...common });
} catch (error) {
  raised = error;
}
expect(APICallError.isInstance(raised), "the error of a model that is none", String(raised));
equal([raised.statusCode, raised.data?.error.code], [404, "model_not_found"], "the error of a model that is none");

const { version } = createRequire(import.meta.url)("ai/package.json");
console.log(JSON.stringify({ version, text: whole.text, usage: whole.usage, error: raised.message }));
