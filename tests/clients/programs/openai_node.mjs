// OpenAI's SDK for JavaScript.
import OpenAI from 'openai';
import { MODEL, OPENAI_URL, QUESTION, SCHEMA, check, run } from './cells.mjs';

const client = new OpenAI({ baseURL: OPENAI_URL, apiKey: 'any', maxRetries: 0 });
const ask = { model: MODEL, messages: [{ role: 'user', content: QUESTION }], max_tokens: 40, temperature: 0 };
const tools = [{ type: 'function', function: { name: 'weather', parameters: SCHEMA } }];

await run({
  async chat() {
    check((await client.chat.completions.create(ask)).choices[0].message.content.trim());
  },
  async stream() {
    const final = await client.chat.completions.stream(ask).finalContent();
    check(final === (await client.chat.completions.create(ask)).choices[0].message.content, final);
  },
  async tools() {
    const answer = await client.chat.completions.create({ ...ask, tools, tool_choice: 'required' });
    check('city' in JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments), answer);
  },
  async responses() {
    const body = { model: MODEL, max_output_tokens: 12 };
    const first = await client.responses.create({ ...body, input: QUESTION });
    const second = await client.responses.create({ ...body, input: 'Where?', previous_response_id: first.id });
    check(second.usage.input_tokens > first.usage.input_tokens, second.usage);
  },
  async embeddings() {
    check((await client.embeddings.create({ model: MODEL, input: 'a river' })).data[0].embedding.length > 1);
  },
});
