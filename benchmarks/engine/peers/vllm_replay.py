"""A worker of vLLM that says what prepared streams say, in whichever process vLLM starts it.

What it samples is replaced by the next tokens of the stream, after it has sampled: a draft is accepted as far as it
equals them. The work is in the environment: REPLAYED_WORK.
"""

import json
import os
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore
from vllm.v1.worker.gpu_worker import Worker  # pyright: ignore

from benchmarks.support.long_work import LongWork


class ReplayWorker(Worker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replay(LongWork(**json.loads(os.environ["REPLAYED_WORK"])).said())


def replay(said: torch.Tensor) -> None:
    sample, on_device = GPUModelRunner._sample, list[torch.Tensor]()

    def replaying(self, logits, spec):
        out = sample(self, logits, spec)
        batch, ids = self.input_batch, out.sampled_token_ids
        n, width = ids.shape
        if not on_device:
            on_device.append(said.to(ids.device))
        streams = [int(id.split("-")[0]) % len(said) for id in batch.req_ids[:n]]
        begun = (batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]).tolist()
        where = torch.tensor([streams, begun], device=ids.device)
        ahead = torch.arange(width, device=ids.device)
        at = (where[1][:, None] + ahead).clamp(0, said.shape[1] - 1)
        wanted = on_device[0][where[0][:, None], at].to(ids.dtype)
        if spec is not None:
            counts = torch.tensor(spec.num_draft_tokens, device=ids.device)
            drafts = torch.full((n, width), -1, dtype=ids.dtype, device=ids.device)
            drafts[ahead < counts[:, None]] = spec.draft_token_ids.to(ids.dtype)
            good = (drafts == wanted).long().cumprod(1).sum(1)
            wanted = torch.where(ahead <= good[:, None], wanted, -1)
        out.sampled_token_ids = wanted
        return out

    GPUModelRunner._sample = replaying
