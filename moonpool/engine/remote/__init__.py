"""Stages on other hosts: a worker behind a network ([ADR 105](docs/adr/0105-stages-on-other-hosts.md))."""
