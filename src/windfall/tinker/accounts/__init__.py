"""Accounts of the server: who may use it, whose turn it is, what each pays for, and what `windfall top` shows."""
