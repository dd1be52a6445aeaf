"""What TRL does for curve.py: `GRPOTrainer` until a time, from its last checkpoint, in a folder of FOLDER.

    python -m benchmarks.beside_trl.trl_half FOLDER NAME SECONDS SETTINGS    (settings of GRPOConfig, as JSON)

It needs TRL, but not windfall. Every line of log.jsonl has the time, the step and what TRL logs.
"""

import json
import sys
import time
from pathlib import Path

from datasets import load_dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.beside_trl.exact import exact

BEGAN_S = time.time()


class UntilTimeIsOver(TrainerCallback):
    def __init__(self, log: Path, ends_s: float):
        self.log, self.ends_s = log, ends_s

    def on_log(self, args, state, control, logs=None, **_):
        responses = args.per_device_train_batch_size * args.gradient_accumulation_steps
        line = {"t": time.time(), "step": state.global_step, "responses": responses, **(logs or {})}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_step_end(self, args, state, control, **_):
        if time.time() >= self.ends_s:
            control.should_save = control.should_training_stop = True


def main(folder: Path, name: str, seconds: float, settings: dict) -> None:
    model = settings.pop("model")
    data = load_dataset("json", data_files={"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")})
    own = folder / name
    own.mkdir(exist_ok=True)
    config = GRPOConfig(output_dir=str(own), logging_steps=1, eval_strategy="steps", save_total_limit=1, **settings)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        reward_funcs=exact,
        callbacks=[UntilTimeIsOver(own / "log.jsonl", BEGAN_S + seconds)],
    )
    last = get_last_checkpoint(str(own))
    if last is None:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=last)
    trainer.save_state()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4]))
