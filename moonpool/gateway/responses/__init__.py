"""OpenAI's Responses: requests, stored responses and conversations, background responses."""
