"""A training loop of a user of the Tinker SDK: python tinker_loop.py URL KEY OUTPUT STEPS

It writes one line of JSON to OUTPUT for everything that a step has brought: what was sampled and with which log-probs,
losses, log-probs of targets. Two loops whose lines are equal have been served equally, bit for bit. Seeds are given,
because those that the server chooses differ between sessions.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import tinker
from tinker import types

WAIT_S = 240
"""A call takes at most this long, with all processes of the server killed meanwhile."""
SAVE_EVERY, LOAD_EVERY = 3, 5
PROMPTS = ([8, 9, 10], [11, 12, 13, 14], [15, 16])


def text(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(prompt: list[int], tokens: list[int], **inputs: Any) -> types.Datum:
    """A datum whose targets are the tokens after the prompt. Inputs are 0 before them."""
    ids, before = [*prompt, *tokens], len(prompt) - 1
    full: dict[str, Any] = {name: [0.0] * before + values for name, values in inputs.items()}
    full["target_tokens"] = ids[1:]
    return types.Datum(model_input=text(ids[:-1]), loss_fn_inputs=full)


class Loop:
    def __init__(self, url: str, key: str, output: Path) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.model = self.service.create_lora_training_client("tiny", rank=4, seed=7).result(WAIT_S)
        self.sampler = self.service.create_sampling_client(base_model="tiny").result(WAIT_S)
        self.saved = ""
        self._file = output.open("w")

    def step(self, n: int) -> None:
        asked = [
            self.sampler.sample(
                text(prompt), 2, types.SamplingParams(max_tokens=6 + (n + i) % 5, temperature=1.0, seed=10 * n + i)
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = [future.result(WAIT_S).sequences for future in asked]
        self._note(n, tokens=[[list(s.tokens) for s in answer] for answer in answers])
        self._note(n, sampled=[[list(s.logprobs or ()) for s in answer] for answer in answers])
        policy, supervised = [], []
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            for i, s in enumerate(answer):
                credit = [1.0 if i else -0.5] * len(s.tokens)
                policy.append(datum(prompt, list(s.tokens), logprobs=list(s.logprobs or []), advantages=credit))
            supervised.append(datum(prompt, list(answer[0].tokens), weights=[1.0] * len(answer[0].tokens)))
        gradients = [
            self.model.forward_backward(policy, "importance_sampling"),
            self.model.forward_backward(supervised, "cross_entropy"),
        ]
        update = self.model.optim_step(types.AdamParams(learning_rate=1e-3))
        for gradient in gradients:
            found = gradient.result(WAIT_S)
            logprobs = [list(out["logprobs"].data) for out in found.loss_fn_outputs]
            self._note(n, metrics=found.metrics, targets=logprobs)
        update.result(WAIT_S)
        if n % SAVE_EVERY == 0:
            self.saved = self.model.save_state(f"step-{n}").result(WAIT_S).path
        if n % LOAD_EVERY == 0 and self.saved:
            self.model.load_state_with_optimizer(self.saved).result(WAIT_S)
        if n % 2:
            self.sampler = self.model.save_weights_and_get_sampling_client()
        else:
            path = self.model.save_weights_for_sampler(f"sampler-{n}").result(WAIT_S).path
            self.sampler = self.service.create_sampling_client(model_path=path).result(WAIT_S)

    def end(self) -> None:
        """The last line has the path of the weights."""
        self._note(0, weights=self.model.save_state("final").result(WAIT_S).path)
        self.service.close("success").result(WAIT_S)

    def _note(self, step: int, **found: Any) -> None:
        self._file.write(json.dumps({"step": step, **found}) + "\n")
        self._file.flush()


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    url, key, output, steps = sys.argv[1:]
    loop = Loop(url, key, Path(output))
    for n in range(1, int(steps) + 1):
        loop.step(n)
    loop.end()


if __name__ == "__main__":
    main()
