// The openai package for Node: prints one JSON object with what each call returned.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, cases] = [process.argv[2], JSON.parse(process.argv[3])];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.enum(["Köln", "Bonn"]), districts: z.number().int().min(1).max(9) });
const user = (content) => ({ model: "llm", messages: [{ role: "user", content }] });

const chat = (await client.chat.completions.create(user(cases.greeting))).choices[0].message.content;

const stream = [];
for await (const chunk of await client.chat.completions.create({ ...user(cases.greeting), stream: true })) {
  stream.push(chunk.choices[0]?.delta?.content ?? "");
}

const runner = client.chat.completions.runTools({
  ...user(cases.call),
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: ({ city }) => `It rains in ${city}.`,
      },
    },
  ],
});
const tools = await runner.finalContent();

const schema = [];
for (const said of cases.cities) {
  const body = { ...user(said), max_tokens: 100, response_format: zodResponseFormat(City, "city") };
  schema.push((await client.chat.completions.parse(body)).choices[0].message.parsed);
}

const full = await client.chat.completions.create(user(cases.tooLong)).catch((error) => ({
  type: error.constructor.name,
  code: error.code,
  message: error.message,
}));

const responses = [];
for await (const event of await client.responses.create({ model: "llm", input: cases.greeting, stream: true })) {
  if (event.type === "response.output_text.delta") responses.push(event.delta);
}

console.log(JSON.stringify({ chat, stream, tools, schema, full, responses }));
