"""What the server has on disk: calls, sessions, models and saved weights."""
