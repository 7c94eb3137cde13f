// The Vercel AI SDK: prints one JSON object with what each call returned.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, cases] = [process.argv[2], JSON.parse(process.argv[3])];
const provider = createOpenAICompatible({
  name: "tokasaurus",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("llm");
const City = z.object({ name: z.enum(["Köln", "Bonn"]), districts: z.number().int().min(1).max(9) });
const weather = tool({
  description: "Report the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It rains in ${city}.`,
});

const answer = await generateText({ model, prompt: cases.greeting, maxRetries: 0 });

const streamed = streamText({ model, prompt: cases.greeting, maxRetries: 0 });
const stream = [];
for await (const delta of streamed.textStream) stream.push(delta);
const usage = await streamed.usage;

const tools = [];
const calling = { model, prompt: cases.call, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
tools.push((await generateText(calling)).text);
const steps = await streamText(calling).steps;
tools.push(steps.at(-1).text);

const schema = [];
for (const prompt of cases.cities) {
  const output = Output.object({ schema: City });
  schema.push((await generateText({ model, prompt, output, maxOutputTokens: 100, maxRetries: 0 })).output);
}

const full = await generateText({ model, prompt: cases.tooLong, maxRetries: 0 }).catch((error) => ({
  type: error.name,
  status: error.statusCode,
  code: error.data?.error?.code,
  message: error.message,
}));

console.log(
  JSON.stringify({ chat: answer.text, stream, tools, schema, full, usage: [answer.usage.outputTokens, usage.outputTokens] }),
);
