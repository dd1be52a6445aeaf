"""The devices of one machine, what runs on them, and how a machine joins a service elsewhere."""
