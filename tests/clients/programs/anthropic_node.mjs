// Anthropic's SDK for JavaScript.
import Anthropic from '@anthropic-ai/sdk';
import { MODEL, QUESTION, SCHEMA, URL_, check, run } from './cells.mjs';

const client = new Anthropic({ baseURL: URL_, apiKey: 'any', maxRetries: 0 });
const ask = { model: MODEL, max_tokens: 40, messages: [{ role: 'user', content: QUESTION }] };

await run({
  async messages() {
    check((await client.messages.create(ask)).content[0].text, 'no text');
  },
  async stream() {
    check((await client.messages.stream(ask).finalMessage()).usage.output_tokens > 0);
  },
  async tools() {
    const tools = [{ name: 'weather', input_schema: SCHEMA }];
    const answer = await client.messages.create({ ...ask, tools, tool_choice: { type: 'any' } });
    check(answer.stop_reason === 'tool_use' && 'city' in answer.content[0].input, answer);
  },
});
