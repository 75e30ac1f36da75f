// What every JavaScript program of `make clients` shares.
export const URL_ = process.env.CLIENTS_URL;
export const OPENAI_URL = `${URL_}/v1`;
export const MODEL = process.env.CLIENTS_MODEL;
export const QUESTION = 'What is the capital of France?';
export const SCHEMA = {
  type: 'object',
  properties: { city: { enum: ['Paris', 'Rome'] } },
  required: ['city'],
  additionalProperties: false,
};

export function check(holds, shown) {
  if (!holds) throw new Error(JSON.stringify(shown)?.slice(0, 300) ?? 'does not hold');
}

export async function run(cells) {
  for (const [cell, work] of Object.entries(cells)) {
    let error = '';
    try {
      await work();
    } catch (caught) {
      console.error(caught);
      error = String(caught).slice(0, 300);
    }
    console.log(JSON.stringify({ cell, error }));
  }
}
