"""The gateway: OpenAI's HTTP interface in front of a conductor. A client of the SDK, without state; without torch."""
