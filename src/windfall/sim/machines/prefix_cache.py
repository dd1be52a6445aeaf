"""What a simulated engine has in its prefix cache of responses that do not run: tokens, not pages. Pure.

Running responses and the cache share the KV memory. The least recently used tokens are overwritten first. Prompts that
siblings share count for each of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict


class PrefixCache:
    def __init__(self, kv_tokens: int) -> None:
        """`kv_tokens`: size of the KV memory; 0: unlimited."""
        self.limit(kv_tokens)
        self._cached: OrderedDict[int, tuple[int, str]] = OrderedDict()
        """By the seed of the response, least recently used first: tokens, and the policy that computed them."""
        self._tokens = 0

    def limit(self, kv_tokens: int) -> None:
        self._size = kv_tokens or math.inf

    def release(self, seed: int, tokens: int, policy: str = "") -> None:
        """A turn has ended, and its tokens stay until they are overwritten."""
        self.take(seed)
        self._cached[seed] = tokens, policy
        self._tokens += tokens

    def take(self, seed: int) -> int:
        """Tokens of this response that are in the cache; from now on, a running response has them."""
        tokens, _ = self._cached.pop(seed, (0, ""))
        self._tokens -= tokens
        return tokens

    def fit(self, context: int) -> None:
        """Overwrite what has no room beside the running responses, which have `context` tokens."""
        while self._cached and self._tokens > self._size - context:
            seed, (tokens, policy) = self._cached.popitem(last=False)
            self._tokens -= tokens
            left = min(tokens, int(self._size - context - self._tokens))
            if left > 0:
                self._cached[seed] = left, policy
                self._cached.move_to_end(seed, last=False)
                self._tokens += left

    def clear(self) -> None:
        self._cached.clear()
        self._tokens = 0

    def forget(self, policy: str) -> None:
        """This policy has new weights."""
        for seed in [seed for seed, (_, of) in self._cached.items() if of == policy]:
            self.take(seed)
