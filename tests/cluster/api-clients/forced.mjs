// Forced calls and constrained answers with npm clients: node forced.mjs URL MODEL SCENARIO... The model writes anything
// that the grammar allows.
import assert from "node:assert/strict";
import { z } from "zod";
import { aiScenarios, anthropicClient, chatAnthropic, chatOpenAI, model, openAI, refused, run } from "./shared.mjs";

const shape = z.object({ city: z.enum(["Rome", "Oslo"]), soon: z.boolean() });
const schema = { type: "object", required: ["city", "soon"], additionalProperties: false,
                 properties: { city: { type: "string", enum: ["Rome", "Oslo"] },
                               soon: { type: "boolean" } } };
const question = "How is the weather?";

function valid(v) {
  shape.parse(typeof v === "string" ? JSON.parse(v) : v);
}

async function openai(name) {
  const { zodTextFormat } = await import(`${name}/helpers/zod`);
  const client = await openAI(name);
  const ask = { model, input: question, max_output_tokens: 2000 };
  const parsed = await client.responses.parse({ ...ask, text: { format: zodTextFormat(shape, "weather") } });
  assert.equal(parsed.status, "completed");
  valid(parsed.output_parsed);
  const object = await client.responses.create({ ...ask, text: { format: { type: "json_object" } } });
  if (object.status === "completed") JSON.parse(object.output_text);
  const tools = ["weather", "other"].map((tool) => ({
    type: "function", name: tool, parameters: schema, strict: true }));
  for (const choice of ["required", { type: "function", name: "weather" }]) {
    const body = { ...ask, tools, tool_choice: choice, parallel_tool_calls: false };
    const whole = await client.responses.create(body);
    assert.deepEqual(whole.output.map((o) => o.type), ["function_call"]);
    if (choice !== "required") assert.equal(whole.output[0].name, "weather");
    valid(whole.output[0].arguments);
    const streamed = await client.responses.stream(body).finalResponse();
    valid(streamed.output[0].arguments);
  }
  const none = await client.responses.create({ ...ask, tools, tool_choice: "none", max_output_tokens: 8 });
  assert.ok(none.output.every((o) => o.type === "message"));
  const wrong = client.responses.create({ ...ask, text: { format: {
    type: "json_schema", name: "x", schema: { type: "object", not: {} } } } });
  const e = await refused(wrong, 400, "text.format");
  assert.ok(e.param.startsWith("text.format"), e.param);
}

async function anthropic() {
  const client = await anthropicClient();
  const ask = { model, max_tokens: 2000, messages: [{ role: "user", content: question }] };
  const tools = ["weather", "other"].map((name) => ({ name, input_schema: schema }));
  for (const choice of [{ type: "any" }, { type: "tool", name: "weather" }]) {
    const body = { ...ask, tools, tool_choice: { ...choice, disable_parallel_tool_use: true } };
    const whole = await client.messages.create(body);
    assert.equal(whole.stop_reason, "tool_use");
    assert.deepEqual(whole.content.map((b) => b.type), ["tool_use"]);
    if (choice.type === "tool") assert.equal(whole.content[0].name, "weather");
    valid(whole.content[0].input);
    valid((await client.messages.stream(body).finalMessage()).content[0].input);
  }
  const json = await client.messages.create({ ...ask, output_config: { format: { type: "json_schema", schema } } });
  assert.equal(json.stop_reason, "end_turn");
  valid(json.content[0].text);
}

async function aiSdk(languageModel) {
  const { generateObject, streamObject, generateText, tool } = await import("ai");
  const ask = { model: languageModel, prompt: question, maxRetries: 0, maxOutputTokens: 2000 };
  valid((await generateObject({ ...ask, schema: shape })).object);
  const stream = streamObject({ ...ask, schema: shape, onError: ({ error }) => { throw error; } });
  for await (const part of stream.partialObjectStream) assert.ok(part);
  valid(await stream.object);
  const tools = { weather: tool({ inputSchema: shape }), other: tool({ inputSchema: shape }) };
  const required = await generateText({ ...ask, tools, toolChoice: "required" });
  valid(required.toolCalls[0].input);
  const named = await generateText({ ...ask, tools, toolChoice: { type: "tool", toolName: "weather" } });
  assert.equal(named.toolCalls[0].toolName, "weather");
  valid(named.toolCalls[0].input);
}

async function langChain(llm, methods) {
  for (const method of methods) {
    valid(await llm.withStructuredOutput(shape, { method, name: "weather" }).invoke(question));
  }
}

const scenarios = {
  openai5: () => openai("openai5"),
  openai6: () => openai("openai"),
  anthropic,
  ...aiScenarios(aiSdk, { supportsStructuredOutputs: true }),
  async langchain_openai() {
    for (const llm of await chatOpenAI({ maxTokens: 2000 })) await langChain(llm, ["jsonSchema", "functionCalling"]);
  },
  langchain_anthropic: async () => langChain(await chatAnthropic({ maxTokens: 2000 }), ["functionCalling"]),
};

await run(scenarios);
