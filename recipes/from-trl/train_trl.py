"""A TRL script as people write it: `python train_trl.py` in this folder, with `pip install trl`.

recipe.toml is the same run for windfall: `windfall train recipes/from-trl/recipe.toml`. See docs/guides/from-trl.md.
"""

from datasets import load_dataset
from rewards import accuracy, shows_work
from trl import GRPOConfig, GRPOTrainer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

files = {"train": "train.jsonl", "test": "test.jsonl"}
data = load_dataset("json", data_files=files).rename_column("question", "prompt")

config = GRPOConfig(
    output_dir="runs/from-trl",
    max_steps=12,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=64,
    temperature=1.0,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    beta=0.0,
    loss_type="grpo",
    reward_weights=[1.0, 0.2],
    eval_strategy="steps",
    eval_steps=6,
    num_generations_eval=4,
)
trainer = GRPOTrainer(
    model=MODEL,
    args=config,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    reward_funcs=[accuracy, shows_work],
)

if __name__ == "__main__":
    trainer.train()
