"""kvgate: a request router for vLLM engines that knows their KV caches."""

__version__ = "0.1.0"
