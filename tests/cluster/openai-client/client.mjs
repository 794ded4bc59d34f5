// One scenario of the openai package against a running cluster: node client.mjs URL MODEL SCENARIO.
// Exit status 0 and a last line "ok" when all of it holds. ../test_openai_client.py runs it.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.TEST_API_KEY ?? "none",
                            maxRetries: 0, timeout: 60000 });
const messages = [{ role: "system", content: "You are a player." },
                  { role: "user", content: "Speak, good sir." }];
const prompt = "ROMEO:\n";
const greedy = { model, temperature: 0, max_tokens: 16 };

const weather = {
  name: "weather", description: "The weather of a city.", strict: true,
  parameters: { type: "object", additionalProperties: false, required: ["city", "days"],
                properties: { city: { type: "string", enum: ["Rome", "Paris"] },
                              days: { type: "integer", minimum: 1, maximum: 9 } } } };
// JSON may have any number of blanks between its tokens, and this model likes them
const blanks = { 197: -30, 198: -30, 201: -30, 220: -30, 272: -30 };
const forced = { model, messages, temperature: 0, max_tokens: 300, logit_bias: blanks, parallel_tool_calls: false,
                 tools: [{ type: "function", function: weather }] };

function checkArguments(f) {
  const a = JSON.parse(f.arguments);
  assert.equal(f.name, "weather");
  assert.ok(["Rome", "Paris"].includes(a.city) && Number.isInteger(a.days), f.arguments);
}

async function refused(promise, type, status, param) {
  const e = await promise.then(() => assert.fail("was not refused"), (err) => err);
  assert.ok(e instanceof type, `${e.constructor.name}: ${e.message}`);
  assert.equal(e.status, status);
  if (param !== undefined) assert.equal(e.param, param);
  assert.ok(e.message.length > 10);
}

const scenarios = {
  async models() {
    const list = await client.models.list();
    assert.deepEqual(list.data.map((m) => m.id), [model]);
    assert.equal((await client.models.retrieve(model)).object, "model");
  },

  async chat() {
    const out = await client.chat.completions.create({ ...greedy, messages });
    assert.equal(out.object, "chat.completion");
    assert.equal(out.choices[0].message.role, "assistant");
    assert.ok(out.choices[0].message.content.length > 0);
    assert.ok(["stop", "length"].includes(out.choices[0].finish_reason));
    assert.equal(out.usage.total_tokens, out.usage.prompt_tokens + out.usage.completion_tokens);
    const parts = messages.map((m) => ({ ...m, content: [{ type: "text", text: m.content }] }));
    const same = await client.chat.completions.create({ ...greedy, messages: parts });
    assert.equal(same.choices[0].message.content, out.choices[0].message.content);
  },

  async chat_stream() {
    const whole = await client.chat.completions.create({ ...greedy, messages });
    const stream = await client.chat.completions.create({
      ...greedy, messages, stream: true, stream_options: { include_usage: true } });
    let text = "", finish = null, usage = null, chunks = 0;
    for await (const chunk of stream) {
      assert.equal(chunk.object, "chat.completion.chunk");
      if (chunk.choices.length > 0) {
        chunks++;
        text += chunk.choices[0].delta.content ?? "";
        finish = chunk.choices[0].finish_reason ?? finish;
      } else {
        usage = chunk.usage;
      }
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(finish, whole.choices[0].finish_reason);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
    assert.ok(chunks >= whole.usage.completion_tokens);
  },

  // the helper that gathers a stream by itself
  async chat_stream_helper() {
    const whole = await client.chat.completions.create({ ...greedy, messages });
    const stream = client.chat.completions.stream({ ...greedy, messages });
    assert.equal(await stream.finalContent(), whole.choices[0].message.content);
    const last = await stream.finalChatCompletion();
    assert.equal(last.choices[0].message.role, "assistant");
  },

  // ---- tools: test_tools.py has a model that knows them ----

  async tools() {
    for (const choice of ["required", { type: "function", function: { name: "weather" } }]) {
      const out = await client.chat.completions.create({ ...forced, tool_choice: choice });
      const m = out.choices[0].message;
      assert.equal(m.content, null);
      assert.equal(out.choices[0].finish_reason, "tool_calls");
      assert.equal(m.tool_calls[0].type, "function");
      checkArguments(m.tool_calls[0].function);
    }
    // the parsing helper wants strict tools
    const parsed = await client.chat.completions.parse({ ...forced, tool_choice: "required" });
    checkArguments(parsed.choices[0].message.tool_calls[0].function);
    assert.ok(["Rome", "Paris"].includes(parsed.choices[0].message.tool_calls[0].function.parsed_arguments.city));
    await refused(client.chat.completions.create({ model, messages, tool_choice: "required" }),
                  OpenAI.BadRequestError, 400, "tool_choice");
  },

  async tools_stream() {
    const body = { ...forced, tool_choice: "required" };
    const whole = (await client.chat.completions.create(body)).choices[0].message.tool_calls[0];
    let pieces = 0, done = null;
    const stream = client.chat.completions.stream(body);
    stream.on("tool_calls.function.arguments.delta", () => pieces++);
    stream.on("tool_calls.function.arguments.done", (e) => { done = e; });
    const last = await stream.finalChatCompletion();
    const call = last.choices[0].message.tool_calls[0];
    assert.equal(call.function.arguments, whole.function.arguments);
    assert.equal(last.choices[0].finish_reason, "tool_calls");
    assert.ok(pieces > 1, `${pieces} pieces`);
    assert.equal(done.arguments, whole.function.arguments);
  },

  // the helper that calls the functions and goes on with their results
  async tools_run() {
    for (const stream of [false, true]) {
      const seen = [];
      const { tools: _, ...rest } = forced;
      const runner = client.chat.completions.runTools({
        ...rest, stream, tool_choice: "required",
        tools: [{ type: "function", function: { ...weather, parse: JSON.parse,
                                                function: (a) => { seen.push(a); return "sunny"; } } }],
      }, { maxChatCompletions: 3 });
      await runner.done();
      assert.equal(seen.length, 3);
      for (const a of seen) assert.ok(["Rome", "Paris"].includes(a.city) && a.days >= 1, JSON.stringify(a));
      assert.equal(runner.messages.filter((m) => m.role === "tool").length, 3);
    }
  },

  async chat_choices() {
    const body = { model, messages, n: 3, seed: 5, temperature: 0.9, max_tokens: 8 };
    const out = await client.chat.completions.create(body);
    assert.deepEqual(out.choices.map((c) => c.index), [0, 1, 2]);
    const text = ["", "", ""];
    for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
      for (const c of chunk.choices) text[c.index] += c.delta.content ?? "";
    }
    assert.deepEqual(text, out.choices.map((c) => c.message.content));
  },

  async chat_logprobs() {
    const out = await client.chat.completions.create({
      ...greedy, messages, max_tokens: 4, logprobs: true, top_logprobs: 3 });
    for (const t of out.choices[0].logprobs.content) {
      assert.equal(t.top_logprobs.length, 3);
      assert.equal(t.top_logprobs[0].token, t.token);
      assert.ok(t.logprob <= 0 && Array.isArray(t.bytes));
    }
  },

  async completions() {
    const alone = [];
    for (const p of [prompt, "JULIET:\n"]) {
      const out = await client.completions.create({ ...greedy, prompt: p, logprobs: 2 });
      assert.equal(out.object, "text_completion");
      assert.equal(out.choices[0].logprobs.tokens.join(""), out.choices[0].text);
      alone.push(out.choices[0].text);
    }
    const both = await client.completions.create({ ...greedy, prompt: [prompt, "JULIET:\n"] });
    assert.deepEqual(both.choices.map((c) => c.text), alone);
    const text = ["", ""];
    const stream = await client.completions.create({
      ...greedy, prompt: [prompt, "JULIET:\n"], stream: true });
    for await (const chunk of stream) text[chunk.choices[0].index] += chunk.choices[0].text;
    assert.deepEqual(text, alone);
    const stop = alone[0].slice(4, 8);
    const cut = await client.completions.create({ ...greedy, prompt, stop: [stop] });
    assert.equal(cut.choices[0].text, alone[0].slice(0, alone[0].indexOf(stop)));
    assert.equal(cut.choices[0].finish_reason, "stop");
  },

  async structured() {
    const schema = { type: "object", additionalProperties: false, required: ["verdict", "lines"],
                     properties: { verdict: { enum: ["yea", "nay"] },
                                   lines: { type: "integer", minimum: 1, maximum: 99 } } };
    const body = { ...greedy, max_tokens: 200, temperature: 1, seed: 3, messages,
                   response_format: { type: "json_schema",
                                      json_schema: { name: "v", strict: true, schema } } };
    const check = (text) => {
      const v = JSON.parse(text);
      assert.deepEqual(Object.keys(v).sort(), ["lines", "verdict"]);
      assert.ok(["yea", "nay"].includes(v.verdict) && v.lines >= 1 && v.lines <= 99, text);
      return v;
    };
    const out = await client.chat.completions.parse(body);
    assert.equal(out.choices[0].finish_reason, "stop");
    assert.deepEqual(out.choices[0].message.parsed, check(out.choices[0].message.content));
    const stream = client.chat.completions.stream({ ...body, stream: true });
    assert.equal(await stream.finalContent(), out.choices[0].message.content);
    await refused(client.chat.completions.create({ ...body, response_format: {
      type: "json_schema", json_schema: { name: "v", schema: { type: "objekt" } } } }),
                  OpenAI.BadRequestError, 400, "response_format.json_schema.schema");
  },

  async errors() {
    const chat = (more) => client.chat.completions.create({ ...greedy, messages, ...more });
    await refused(chat({ temperature: -1 }), OpenAI.BadRequestError, 400, "temperature");
    await refused(chat({ messages: [] }), OpenAI.BadRequestError, 400, "messages");
    await refused(chat({ model: "gpt-4" }), OpenAI.NotFoundError, 404, "model");
    await refused(chat({ response_format: { type: "xml" } }), OpenAI.BadRequestError, 400,
                  "response_format");
    await refused(chat({ tools: [{ type: "function", function: { name: "f", parameters: {} } }] }),
                  OpenAI.BadRequestError, 400, "tools");
    await refused(chat({ stream: true, n: 0 }), OpenAI.BadRequestError, 400, "n");
    await refused(client.completions.create({ ...greedy, prompt: Array(9000).fill(1) }),
                  OpenAI.BadRequestError, 400, "prompt");
    await refused(client.embeddings.create({ model, input: "a" }), OpenAI.NotFoundError, 404);
  },

  async unauthorized() {
    await refused(client.models.list().then(() => {}), OpenAI.AuthenticationError, 401);
    await refused(client.chat.completions.create({ ...greedy, messages, stream: true }),
                  OpenAI.AuthenticationError, 401);
  },

  // leaves a stream in the middle, both ways that the package has, and a whole answer
  async abort() {
    // eight choices: no machine generates them before the client has left
    const body = { model, messages, max_tokens: 8000, n: 8, stream: true, ignore_eos: true };
    let n = 0;
    const stream = await client.chat.completions.create(body);
    for await (const chunk of stream) {
      assert.equal(chunk.choices.length, 1);
      if (++n === 5) break;
    }
    const control = new AbortController();
    n = 0;
    try {
      const second = await client.chat.completions.create(body, { signal: control.signal });
      for await (const chunk of second) {
        assert.equal(chunk.choices.length, 1);
        if (++n === 5) control.abort();
      }
    } catch (e) {
      assert.ok(e instanceof OpenAI.APIUserAbortError, e.message);
    }
    assert.ok(n >= 5 && n < 8 * 8000);
    const third = client.chat.completions.create({ ...body, stream: false }, { timeout: 1000 });
    await third.then(() => assert.fail("was answered"),
                     (e) => assert.ok(e instanceof OpenAI.APIConnectionTimeoutError, e.message));
  },
};

await scenarios[scenario]();
console.log("ok");
