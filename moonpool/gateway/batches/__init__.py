"""Files and batches, as OpenAI has them: many requests whose answers nobody waits for."""
