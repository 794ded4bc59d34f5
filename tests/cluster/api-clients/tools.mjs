// Tools and reasoning with npm clients: node tools.mjs URL MODEL SCENARIO... The model answers with a copy of the last
// message, so the question is a scripted answer, and the answer to a tool's result is that result.
import assert from "node:assert/strict";
import { z } from "zod";
import { aiScenarios, anthropicClient, chatAnthropic, chatOpenAI, model, openAI, run } from "./shared.mjs";

const input = { city: "Rome", "days": 2 };
const question = `<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n${JSON.stringify({
  name: "weather", arguments: input })}\n</tool_call>`;
const result = "Sunny, for two days.";
const schema = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } },
                 required: ["city", "days"] };
const fields = { name: "weather", description: "Tells the weather" };

/* Runs the tool as clients do that execute tools themselves. */
function weather(args) {
  assert.deepEqual(args, input);
  return result;
}

// ---- openai ----

async function chat(name) {
  const client = await openAI(name);
  const body = { model, messages: [{ role: "user", content: question }],
                 tools: [{ type: "function", function: { ...fields, parameters: schema } }] };
  const whole = (await client.chat.completions.create(body)).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(whole.message.tool_calls[0].function.arguments), input);
  assert.equal(whole.message.reasoning_content, "hm");
  const streamed = (await client.chat.completions.stream(body).finalChatCompletion()).choices[0];
  assert.equal(streamed.finish_reason, "tool_calls");
  assert.equal(streamed.message.content, whole.message.content);
  assert.equal(streamed.message.tool_calls[0].function.arguments,
               whole.message.tool_calls[0].function.arguments);
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ ...body, stream, tools: [{
      type: "function", function: { ...fields, parameters: schema, parse: JSON.parse, function: weather } }] });
    assert.equal(await runner.finalContent(), result);
  }
}

async function responses(name) {
  const client = await openAI(name);
  const body = { model, input: [{ role: "user", content: question }],
                 tools: [{ type: "function", ...fields, parameters: schema, strict: false }] };
  const whole = await client.responses.create(body);
  assert.deepEqual(whole.output.map((o) => o.type), ["reasoning", "message", "function_call"]);
  assert.equal(whole.output_text.trim(), "Let me see.");
  assert.deepEqual(JSON.parse(whole.output[2].arguments), input);
  assert.ok(whole.usage.output_tokens_details.reasoning_tokens > 0);

  let args = "", done;
  for await (const e of await client.responses.create({ ...body, stream: true })) {
    if (e.type === "response.function_call_arguments.delta") args += e.delta;
    if (e.type === "response.function_call_arguments.done") done = e.arguments;
  }
  assert.equal(args, done);
  assert.deepEqual(JSON.parse(args), input);
  const helped = await client.responses.stream(body).finalResponse();
  assert.deepEqual(helped.output.map((o) => o.type), whole.output.map((o) => o.type));
  assert.equal(helped.output[2].arguments, whole.output[2].arguments);

  const next = await client.responses.create({ ...body, input: [
    ...body.input, ...whole.output,
    { type: "function_call_output", call_id: whole.output[2].call_id,
      output: weather(JSON.parse(whole.output[2].arguments)) }] });
  assert.equal(next.output_text, result);
}

// ---- the Anthropic client ----

async function anthropic() {
  const client = await anthropicClient();
  const body = { model, max_tokens: 200, messages: [{ role: "user", content: question }],
                 tools: [{ ...fields, input_schema: schema }] };
  const whole = await client.messages.create(body);
  assert.equal(whole.stop_reason, "tool_use");
  assert.deepEqual(whole.content.map((b) => b.type), ["thinking", "text", "tool_use"]);
  assert.equal(whole.content[0].thinking, "hm");
  assert.equal(whole.content[1].text.trim(), "Let me see.");
  assert.deepEqual(whole.content[2].input, input);
  const streamed = await client.messages.stream(body).finalMessage();
  const plain = (m) => m.content.map(({ id, ...rest }) => rest);
  assert.deepEqual(plain(streamed), plain(whole));
  assert.equal(streamed.stop_reason, "tool_use");

  const use = whole.content[2];
  const next = await client.messages.create({ ...body, messages: [
    ...body.messages, { role: "assistant", content: whole.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: weather(use.input) }] }] });
  assert.deepEqual(next.content, [{ type: "text", text: result }]);
  assert.equal(next.stop_reason, "end_turn");
  const counted = await client.messages.countTokens({ model, messages: body.messages, tools: body.tools });
  assert.ok(counted.input_tokens > 20);
}

// ---- the AI SDK ----

async function aiSdk(languageModel) {
  const { generateText, streamText, stepCountIs, tool } = await import("ai");
  const ask = { model: languageModel, prompt: question, maxOutputTokens: 200, maxRetries: 0,
                stopWhen: stepCountIs(2), providerOptions: { openai: { store: false } },
                tools: { weather: tool({ description: fields.description,
                                         inputSchema: z.object({ city: z.string(), days: z.number() }),
                                         execute: weather }) } };
  const whole = await generateText(ask);
  assert.equal(whole.steps[0].finishReason, "tool-calls");
  assert.equal(whole.steps[0].text.trim(), "Let me see.");
  assert.deepEqual(whole.steps[0].toolCalls[0].input, input);
  assert.equal(whole.text, result);
  const stream = streamText({ ...ask, onError: ({ error }) => { throw error; } });
  const kinds = new Set();
  for await (const part of stream.fullStream) kinds.add(part.type);
  assert.ok(kinds.has("tool-call") && kinds.has("tool-result"));
  const steps = await stream.steps;
  assert.equal(steps[0].text.trim(), "Let me see.");
  assert.deepEqual(steps[0].toolCalls[0].input, input);
  assert.equal(steps[1].text, result);
}

// ---- LangChain ----

async function langChain(llm) {
  const { tool } = await import("@langchain/core/tools");
  const { HumanMessage, ToolMessage } = await import("@langchain/core/messages");
  const bound = llm.bindTools([tool(weather, { ...fields,
                                               schema: z.object({ city: z.string(), days: z.number() }) })]);
  const ask = [new HumanMessage(question)];
  const whole = await bound.invoke(ask);
  assert.deepEqual(whole.tool_calls[0].args, input);
  assert.equal(whole.text.trim(), "Let me see.");
  let streamed;
  for await (const chunk of await bound.stream(ask)) {
    streamed = streamed === undefined ? chunk : streamed.concat(chunk);
  }
  assert.deepEqual(streamed.tool_calls[0].args, input);
  assert.equal(streamed.text.trim(), "Let me see.");
  const next = await bound.invoke([...ask, whole, new ToolMessage({
    tool_call_id: whole.tool_calls[0].id, content: weather(whole.tool_calls[0].args) })]);
  assert.equal(next.text, result);
}

const scenarios = {
  chat5: () => chat("openai5"),
  chat6: () => chat("openai"),
  openai5: () => responses("openai5"),
  openai6: () => responses("openai"),
  anthropic,
  ...aiScenarios(aiSdk),
  async langchain_openai() {
    for (const llm of await chatOpenAI({ maxTokens: 200 })) await langChain(llm);
  },
  langchain_anthropic: async () => langChain(await chatAnthropic({ maxTokens: 200 })),
};

await run(scenarios);
