"""Agents: programs that talk to the policy over the OpenAI API, each started once per response in its own process."""
