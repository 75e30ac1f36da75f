"""The gateway: HTTP interfaces of others and a page in front of a conductor. A client of the SDK; without torch."""
