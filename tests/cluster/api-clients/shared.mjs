// The clients that the scenarios of this folder use, and how these run: node FILE URL MODEL SCENARIO...
import assert from "node:assert/strict";

export const [url, model, ...names] = process.argv.slice(2);
export const apiKey = process.env.TEST_API_KEY ?? "none";
const options = { apiKey, maxRetries: 0, timeout: 60000 };

/* name: the package, of one of two versions. */
export async function openAI(name) {
  const OpenAI = (await import(name)).default;
  return new OpenAI({ ...options, baseURL: `${url}/v1` });
}

export async function anthropicClient() {
  const Anthropic = (await import("@anthropic-ai/sdk")).default;
  return new Anthropic({ ...options, baseURL: url });
}

// ---- models of the AI SDK ----

async function aiOpenAI() {
  const { createOpenAI } = await import("@ai-sdk/openai");
  return createOpenAI({ baseURL: `${url}/v1`, apiKey }).responses(model);
}

async function aiCompatible(more) {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  return createOpenAICompatible({ name: "baton", baseURL: `${url}/v1`, apiKey, ...more })(model);
}

async function aiAnthropic() {
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  return createAnthropic({ baseURL: `${url}/v1`, apiKey })(model);
}

/* A scenario for each of them. compatible: options of the one that speaks chat. */
export function aiScenarios(scenario, compatible = {}) {
  return {
    ai_openai: async () => scenario(await aiOpenAI()),
    ai_compatible: async () => scenario(await aiCompatible(compatible)),
    ai_anthropic: async () => scenario(await aiAnthropic()),
  };
}

// ---- models of LangChain ----

/* One for each API: chat, responses. */
export async function chatOpenAI(fields) {
  const { ChatOpenAI } = await import("@langchain/openai");
  const base = { model, apiKey, maxRetries: 0, configuration: { baseURL: `${url}/v1` }, ...fields };
  return [new ChatOpenAI(base), new ChatOpenAI({ ...base, useResponsesApi: true })];
}

export async function chatAnthropic(fields) {
  const { ChatAnthropic } = await import("@langchain/anthropic");
  return new ChatAnthropic({ model, apiKey, maxRetries: 0, anthropicApiUrl: url, ...fields });
}

// ---- scenarios ----

export async function refused(promise, status, word) {
  const e = await Promise.resolve(promise).then(() => assert.fail("was not refused"), (err) => err);
  assert.equal(e.status ?? e.statusCode, status, `${e}`);
  assert.ok(`${e.message}`.includes(word), e.message);
  return e;
}

/* Prints a line "ok NAME" for each that holds, and ends with status 0 if all do. */
export async function run(scenarios) {
  let failed = 0;
  for (const name of names) {
    try {
      await scenarios[name]();
      console.log(`ok ${name}`);
    } catch (e) {
      failed++;
      console.log(`failed ${name}: ${e.stack}`);
    }
  }
  process.exit(failed > 0 ? 1 : 0);
}
