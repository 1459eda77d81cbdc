"""Communication between nodes: messages, connections, sessions, both sides of pull and push, gradient exchange."""
