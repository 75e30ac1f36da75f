// The AI SDK by its providers of OpenAI's and Anthropic's form.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, embed, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { MODEL, OPENAI_URL, QUESTION, check, run } from './cells.mjs';

const given = { baseURL: OPENAI_URL, apiKey: 'any' };
const compatible = createOpenAICompatible({ name: 'moonpool', ...given, supportsStructuredOutputs: true });
const openai = createOpenAI(given);
const anthropic = createAnthropic(given);
const ask = { prompt: QUESTION, maxOutputTokens: 60, temperature: 0, maxRetries: 0 };
const weather = tool({
  description: 'The weather in a city.',
  inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

async function called(model) {
  const settings = { tools: { weather }, toolChoice: 'required', stopWhen: stepCountIs(1) };
  const { toolResults } = await generateText({ ...ask, model, ...settings });
  check(toolResults[0].output.startsWith('sunny in '), toolResults);
}

await run({
  async chat() {
    check((await generateText({ ...ask, model: compatible(MODEL) })).text.trim());
  },
  async stream() {
    let text = '';
    for await (const piece of streamText({ ...ask, model: compatible(MODEL) }).textStream) text += piece;
    check(text.trim(), text);
  },
  async tools() {
    await called(compatible(MODEL));
  },
  async structured() {
    const output = Output.object({ schema: z.object({ isCapital: z.boolean() }) });
    const found = await generateText({ ...ask, model: compatible(MODEL), output });
    check(typeof found.output.isCapital === 'boolean', found.output);
  },
  async embed() {
    check((await embed({ model: compatible.textEmbeddingModel(MODEL), value: 'a river' })).embedding.length > 1);
  },
  async openai_responses() {
    const model = openai(MODEL);
    const first = await generateText({ ...ask, model });
    const turns = [{ role: 'user', content: QUESTION }, ...first.response.messages];
    const { prompt, ...rest } = ask;
    const second = await generateText({ ...rest, model, messages: [...turns, { role: 'user', content: 'Where?' }] });
    check(second.usage.inputTokens > first.usage.inputTokens, second.usage);
    await called(model);
  },
  async anthropic() {
    check((await generateText({ ...ask, temperature: undefined, model: anthropic(MODEL) })).text);
    await called(anthropic(MODEL));
  },
});
