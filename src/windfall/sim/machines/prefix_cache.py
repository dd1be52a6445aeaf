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
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Tokens by the seed of the response, least recently used first."""
        self._policies: dict[int, str] = {}
        """By seed, the policy whose weights computed them, if it has a name."""
        self._tokens = 0

    def limit(self, kv_tokens: int) -> None:
        self._size = kv_tokens or math.inf

    def release(self, seed: int, tokens: int, policy: str = "") -> None:
        """A turn has ended, and its tokens stay until they are overwritten."""
        self.take(seed)
        if policy:
            self._policies[seed] = policy
        self._cached[seed] = tokens
        self._tokens += tokens

    def take(self, seed: int) -> int:
        """Tokens of this response that are in the cache; from now on, a running response has them."""
        tokens = self._cached.pop(seed, 0)
        self._policies.pop(seed, None)
        self._tokens -= tokens
        return tokens

    def fit(self, context: int) -> None:
        """Overwrite what has no room beside the running responses, which have `context` tokens."""
        while self._cached and self._tokens > self._size - context:
            seed, tokens = self._cached.popitem(last=False)
            self._tokens -= tokens
            left = min(tokens, int(self._size - context - self._tokens))
            if left > 0:
                self._cached[seed] = left
                self._cached.move_to_end(seed, last=False)
                self._tokens += left
            else:
                self._policies.pop(seed, None)

    def clear(self) -> None:
        self._cached.clear()
        self._policies.clear()
        self._tokens = 0

    def forget(self, policy: str) -> None:
        """This policy has new weights."""
        for seed in [seed for seed in self._cached if self._policies.get(seed, "") == policy]:
            self.take(seed)
