// One scenario of npm clients of the Responses and Messages APIs against a running cluster:
// node client.mjs URL MODEL SCENARIO... (shared.mjs).
// ../test_api_clients.py runs it.
import assert from "node:assert/strict";
import { aiScenarios, anthropicClient, apiKey, chatAnthropic, chatOpenAI, model, openAI, refused, run, url } from "./shared.mjs";

const system = "You are a player.", question = "Speak, good sir.";

/* What chat answers: the other APIs must answer the same. */
async function chat(more = {}) {
  const r = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${apiKey}` },
    body: JSON.stringify({ model, temperature: 0, max_tokens: 16, ...more, messages: [
      { role: "system", content: system }, { role: "user", content: question }] }) });
  assert.equal(r.status, 200);
  return r.json();
}

// ---- openai, two versions ----

async function responses(name) {
  const client = await openAI(name);
  const body = { model, instructions: system, input: question, temperature: 0, max_output_tokens: 16 };
  const same = await chat();
  const text = same.choices[0].message.content;
  const whole = await client.responses.create(body);
  assert.equal(whole.output_text, text);
  assert.equal(whole.usage.output_tokens, same.usage.completion_tokens);
  assert.equal(whole.usage.input_tokens, same.usage.prompt_tokens);
  const cut = same.choices[0].finish_reason === "length";
  assert.equal(whole.status, cut ? "incomplete" : "completed");

  let streamed = "", n = 0, last;
  for await (const e of await client.responses.create({ ...body, stream: true })) {
    assert.equal(e.sequence_number, n++);
    if (e.type === "response.output_text.delta") streamed += e.delta;
    last = e;
  }
  assert.equal(streamed, text);
  assert.equal(last.type, cut ? "response.incomplete" : "response.completed");
  assert.equal(last.response.output[0].content[0].text, text);
  assert.equal(last.response.usage.output_tokens, same.usage.completion_tokens);

  const helper = client.responses.stream({ ...body, max_output_tokens: 400 });
  let helped = "";
  helper.on("response.output_text.delta", (e) => { helped += e.delta; });
  const final = await helper.finalResponse();
  assert.equal(final.output[0].content[0].text, helped);
  assert.ok(helped.startsWith(text));

  // the conversation goes on with the items of the answer
  const next = await client.responses.create({ ...body, input: [
    { role: "user", content: question }, ...whole.output, { role: "user", content: "And then?" }] });
  assert.ok(next.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens);
  const lp = await client.responses.create({ ...body, max_output_tokens: 4, top_logprobs: 2,
                                             include: ["message.output_text.logprobs"] });
  assert.ok(lp.output[0].content[0].logprobs.every((t) => t.top_logprobs.length === 2));

  if (name === "openai") { // version 5 has no such call
    const counted = await client.responses.inputTokens.count({ model, instructions: system, input: question });
    assert.equal(counted.input_tokens, whole.usage.input_tokens);
  }

  await refused(client.responses.create({ ...body, previous_response_id: "resp_1" }), 400,
                "send the whole conversation");
  await refused(client.responses.retrieve(whole.id), 404, "does not store");
  await refused(client.responses.create({ ...body, model: "gpt-4" }), 404, "gpt-4");
}

// ---- the Anthropic client ----

async function messages() {
  const client = await anthropicClient();
  const body = { model, system, max_tokens: 16, temperature: 0,
                 messages: [{ role: "user", content: question }] };
  const same = await chat();
  const text = same.choices[0].message.content;
  const whole = await client.messages.create(body);
  assert.deepEqual(whole.content, [{ type: "text", text }]);
  const cut = same.choices[0].finish_reason === "length";
  assert.equal(whole.stop_reason, cut ? "max_tokens" : "end_turn");
  assert.ok(whole._request_id.length > 5);
  const total = (u) => u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens;
  assert.equal(total(whole.usage), same.usage.prompt_tokens);
  assert.equal(whole.usage.output_tokens, same.usage.completion_tokens);

  const types = [];
  let streamed = "", start, end;
  for await (const e of await client.messages.create({ ...body, stream: true })) {
    types.push(e.type);
    if (e.type === "content_block_delta") streamed += e.delta.text;
    if (e.type === "message_start") start = e.message;
    if (e.type === "message_delta") end = e;
  }
  assert.equal(streamed, text);
  assert.deepEqual([types[0], types.at(-2), types.at(-1)],
                   ["message_start", "message_delta", "message_stop"]);
  assert.equal(total(start.usage), same.usage.prompt_tokens);
  assert.equal(total(end.usage), same.usage.prompt_tokens);
  assert.equal(end.usage.output_tokens, same.usage.completion_tokens);

  const helper = client.messages.stream(body);
  let helped = "";
  helper.on("text", (t) => { helped += t; });
  const final = await helper.finalMessage();
  assert.equal(helped, text);
  assert.deepEqual(final.content, [{ type: "text", text }]);
  assert.equal(final.stop_reason, whole.stop_reason);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);

  const counted = await client.messages.countTokens({ model, system, messages: body.messages });
  assert.equal(counted.input_tokens, same.usage.prompt_tokens);
  const stop = text.slice(4, 8);
  const stopped = await client.messages.create({ ...body, stop_sequences: [stop] });
  assert.equal(stopped.stop_reason, "stop_sequence");
  assert.equal(stopped.stop_sequence, stop);
  assert.equal(stopped.content[0].text, text.slice(0, text.indexOf(stop)));
  // the answer continues a last turn of the assistant
  const first = text.slice(0, text.indexOf(" ", 6));
  const rest = await client.messages.create({ ...body, messages: [
    ...body.messages, { role: "assistant", content: first }] });
  assert.ok(rest.content[0].text.length > 0);
  assert.ok(total(rest.usage) > total(whole.usage));

  const e = await refused(client.messages.create({ ...body, temperature: -1 }), 400, "temperature");
  assert.ok(e instanceof client.constructor.BadRequestError);
  assert.equal(e.type ?? e.error.error.type, "invalid_request_error");
  const missing = await refused(client.messages.create({ ...body, model: "claude" }), 404, "claude");
  assert.ok(missing instanceof client.constructor.NotFoundError);
  const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "" } };
  await refused(client.messages.create({ ...body, messages: [{ role: "user", content: [image] }] }),
                400, "'image'");
}

// Leaves a stream in the middle.
async function abort() {
  const anthropic = await anthropicClient(), openai = await openAI("openai");
  let n = 0;
  const long = { model, stream: true, ignore_eos: true };
  for await (const e of await anthropic.messages.create({
    ...long, max_tokens: 8000, messages: [{ role: "user", content: question }] })) {
    if (e.type === "content_block_delta" && ++n === 5) break;
  }
  for await (const e of await openai.responses.create({
    ...long, max_output_tokens: 8000, input: question })) {
    if (e.type === "response.output_text.delta" && ++n === 10) break;
  }
  assert.equal(n, 10);
}

// ---- the AI SDK ----

async function aiSdk(languageModel) {
  const { generateText, streamText } = await import("ai");
  const same = await chat();
  const text = same.choices[0].message.content;
  const ask = { model: languageModel, system, prompt: question, temperature: 0, maxOutputTokens: 16,
                maxRetries: 0 };
  const whole = await generateText(ask);
  assert.equal(whole.text, text);
  assert.equal(whole.finishReason, same.choices[0].finish_reason);
  assert.equal(whole.usage.outputTokens, same.usage.completion_tokens);
  assert.equal(whole.usage.inputTokens, same.usage.prompt_tokens);
  const stream = streamText({ ...ask, onError: ({ error }) => { throw error; } });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  assert.equal(streamed, text);
  assert.equal(await stream.finishReason, same.choices[0].finish_reason);
  assert.equal((await stream.usage).outputTokens, same.usage.completion_tokens);
  assert.equal((await stream.usage).inputTokens, same.usage.prompt_tokens);
  await refused(generateText({ ...ask, maxOutputTokens: 99999 }), 400, "maximum context length");
}

// ---- LangChain ----

/* usage: false where the client leaves out the usage of streams that end with response.incomplete */
async function langChain(llm, usage = true) {
  const same = await chat();
  const text = same.choices[0].message.content;
  const ask = [["system", system], ["user", question]];
  const whole = await llm.invoke(ask);
  assert.equal(whole.text, text);
  assert.equal(whole.usage_metadata.output_tokens, same.usage.completion_tokens);
  assert.equal(whole.usage_metadata.input_tokens, same.usage.prompt_tokens);
  let streamed;
  for await (const chunk of await llm.stream(ask)) {
    streamed = streamed === undefined ? chunk : streamed.concat(chunk);
  }
  assert.equal(streamed.text, text);
  if (!usage && same.choices[0].finish_reason === "length") return;
  assert.equal(streamed.usage_metadata.output_tokens, same.usage.completion_tokens);
  assert.equal(streamed.usage_metadata.input_tokens, same.usage.prompt_tokens);
}

const scenarios = {
  openai5: () => responses("openai5"),
  openai6: () => responses("openai"),
  anthropic: messages,
  abort,
  ...aiScenarios(aiSdk, { includeUsage: true }),
  async langchain_openai() {
    const [chat, responses] = await chatOpenAI({ temperature: 0, maxTokens: 16, streamUsage: true });
    await langChain(chat);
    await langChain(responses, false);
  },
  langchain_anthropic: async () => langChain(await chatAnthropic({ temperature: 0, maxTokens: 16 })),
};

await run(scenarios);
