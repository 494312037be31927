"""An HTTP server that speaks OpenAI's language: engine in one thread, HTTP on an asyncio loop in another."""
