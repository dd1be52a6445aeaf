"""transformers' `generate`: left-padded batches; a row with all its tokens is done, but stays until the batch is."""

from collections.abc import Callable

import workload as peers

PEER = "transformers generate"
WORKLOAD = peers.load()

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
except ImportError as error:
    peers.skip(PEER, error, "torch==2.13.0 transformers")


Sample = Callable[..., torch.Tensor]  # a model's `generate`


class RowLengths(StoppingCriteria):
    """Row i is done once it has its own number of new tokens."""

    def __init__(self, prompt_len: int, lengths: list[int]) -> None:
        self.stop_at = torch.tensor(lengths) + prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.stop_at


def generate_batch(sample: Sample, prompts: list[list[int]], lengths: list[int]) -> int:
    """Generates for one batch; returns the new tokens of each row, the same for all of them."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    limit = WORKLOAD.longest
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=limit, pad_token_id=0)
    stopping = StoppingCriteriaList([RowLengths(width, lengths)])
    out = sample(input_ids=ids, attention_mask=mask, generation_config=config, stopping_criteria=stopping)
    return out.shape[1] - width


def generate(sample: Sample, prompts: list[list[int]]) -> list[int]:
    """The whole workload, batch after batch; returns the new tokens of each request."""
    made: list[int] = []
    for part in WORKLOAD.slices():
        new = generate_batch(sample, prompts[part], WORKLOAD.lengths[part])
        made += [new] * len(prompts[part])
    return made


def main() -> None:
    torch.set_num_threads(WORKLOAD.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(WORKLOAD.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # a missing value in the call's own config would be filled from here
    generate(model.generate, WORKLOAD.warm_prompts())
    with peers.Timer() as timer:
        made = generate(model.generate, WORKLOAD.prompts)

    peers.check(WORKLOAD, made)
    # A static cache was no faster on two cores, compiled or not, and compiling took one to two minutes.
    note = f"dynamic cache, {model.config._attn_implementation}; {sum(made)} tokens made for {WORKLOAD.useful_tokens}"
    peers.report(PEER, transformers.__version__, WORKLOAD, timer, note)


if __name__ == "__main__":
    main()
