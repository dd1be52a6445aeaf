"""TRL's GRPO rollout with transformers: `GRPOTrainer._generate`, from prompts to completions; nothing is trained."""

import functools
import tempfile

import workload as peers

PEER = "TRL GRPO rollout"
WORKLOAD = peers.load()

try:
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from hf_generate import RowLengths
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, StoppingCriteriaList
except ImportError as error:
    peers.skip(PEER, error, "torch==2.13.0 trl==1.16.0")


def number_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Text "<5> <17>" is tokens [5, 17], whatever the model's own words; no model can make its end of text."""
    words = {f"<{i}>": i for i in range(vocab_size)} | {"<end>": vocab_size}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<0>", padding_side="left")


def rollout_batch(trainer: trl.GRPOTrainer, prompts: list[list[int]], lengths: list[int]) -> list[int]:
    """One batch as a training step makes it; returns the new tokens of each row."""
    model = trainer.model
    stopping = StoppingCriteriaList([RowLengths(max(len(prompt) for prompt in prompts), lengths)])
    model.generate = functools.partial(type(model).generate, model, stopping_criteria=stopping)
    prompt_ids, completion_ids, *_ = trainer._generate([" ".join(f"<{i}>" for i in prompt) for prompt in prompts])
    if prompt_ids != prompts:
        raise RuntimeError("the trainer did not see the prompts' tokens as they were given")
    return [len(ids) for ids in completion_ids]


def rollout(trainer: trl.GRPOTrainer, prompts: list[list[int]]) -> list[int]:
    """The whole workload, batch after batch; returns the new tokens of each request."""
    parts = WORKLOAD.slices()
    return [n for part in parts for n in rollout_batch(trainer, prompts[part], WORKLOAD.lengths[part])]


def main() -> None:
    torch.set_num_threads(WORKLOAD.threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(WORKLOAD.model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=max(2, WORKLOAD.batch),
            num_generations=max(2, WORKLOAD.batch),  # only has to divide the batch here: the prompts are given in full
            max_completion_length=WORKLOAD.longest,
            temperature=1.0,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["<0>"]}),
            processing_class=number_tokenizer(model.config.vocab_size),
        )
    trainer.model.train()  # as it is in a step
    rollout(trainer, WORKLOAD.warm_prompts())
    with peers.Timer() as timer:
        made = rollout(trainer, WORKLOAD.prompts)

    peers.check(WORKLOAD, made)
    note = f"transformers {transformers.__version__} generate; {sum(made)} tokens made for {WORKLOAD.useful_tokens}"
    peers.report(PEER, trl.__version__, WORKLOAD, timer, note)


if __name__ == "__main__":
    main()
