"""Load tests with locust: people who chat, agents, RAG and batch work, in scenarios with limits that must hold."""
