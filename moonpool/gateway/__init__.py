"""The gateway: the HTTP APIs of OpenAI, Anthropic and Kimi, and the dashboard page. A client of the SDK."""
