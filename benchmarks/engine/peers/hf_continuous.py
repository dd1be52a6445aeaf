"""transformers' continuous batching: each request with its own `max_new_tokens`, a finished one leaves the batch."""

import math

import workload as peers

PEER = "transformers continuous batching"
WORKLOAD = peers.load()
PAGE_TOKENS = 32  # the default of 256 was slower on the tiny model, and so was compiling

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching import ContinuousBatchingManager
except ImportError as error:
    peers.skip(PEER, error, "torch==2.13.0 transformers")


def generate(manager: ContinuousBatchingManager, prompts: list[list[int]], lengths: list[int]) -> list[int]:
    """Submits all requests and waits for the last; returns the new tokens of each."""
    made: dict[str | None, int] = {}
    for prompt, length in zip(prompts, lengths, strict=True):
        made[manager.add_request(prompt, max_new_tokens=length)] = 0
    waiting = len(made)
    while waiting:
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread of continuous batching has ended")
        elif result.error is not None:
            raise RuntimeError(f"request {result.request_id} failed: {result.error}")
        elif result.is_finished():
            made[result.request_id] = len(result.generated_tokens)
            waiting -= 1
    return list(made.values())


def main() -> None:
    torch.set_num_threads(WORKLOAD.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(WORKLOAD.model, dtype=torch.float32).eval()
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        # Left to itself the cache takes 60 % of the machine's memory.
        num_blocks=(WORKLOAD.batch + 2) * math.ceil(WORKLOAD.capacity_tokens / PAGE_TOKENS),
        max_batch_tokens=max(512, WORKLOAD.batch),
        max_requests_per_batch=WORKLOAD.batch,
    )
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=batching) as manager:
        generate(manager, WORKLOAD.warm_prompts(), WORKLOAD.lengths)
        with peers.Timer() as timer:
            made = generate(manager, WORKLOAD.prompts, WORKLOAD.lengths)

    peers.check(WORKLOAD, made)
    note = f"pages of {PAGE_TOKENS}, {model.config._attn_implementation}, prefixes shared"
    peers.report(PEER, transformers.__version__, WORKLOAD, timer, note)


if __name__ == "__main__":
    main()
