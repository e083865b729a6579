"""TRL's trainers, on the rows and weights that `tllm train` has: they take turns of steps with it.

`PYTHON -m benchmarks.training.trl_trainers TASK JOB`, run by a Python that has trl; it needs nothing else of this
repository's environment. JOB is a file of JSON with the `Work` of `post_training` that trainers must agree on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes.turns import Sampled, Turns
from benchmarks.training.even_words import even_words

STEPS = 1_000_000  # more than any benchmark asks for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("sft", "dpo", "grpo"))
    parser.add_argument("job", help="JSON: folder, rows, out, dtype, batch, length, generations, learning_rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precompute", action="store_true", help="the reference of dpo once, before the first step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    job = json.loads(options.job)
    if options.task == "dpo":
        job["precompute"] = options.precompute
    transformers, trl = (importlib.import_module(name) for name in ("transformers", "trl"))
    model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
    sampled = Sampled()
    model.generate = timed(model.generate, sampled)
    makers = {"sft": sft, "dpo": dpo, "grpo": grpo}
    trainer = makers[options.task](trl, model, job)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(reporter(transformers.TrainerCallback, sampled))
    trainer.train()


def timed(generate: Callable[..., Any], sampled: Sampled) -> Callable[..., Any]:
    """The same function, whose seconds are added up."""

    def measured(*words: Any, **more: Any) -> Any:
        start = time.perf_counter()
        found = generate(*words, **more)
        sampled.seconds += time.perf_counter() - start
        return found

    return measured


def reporter(base: type, sampled: Sampled) -> Any:
    """A callback of the trainer that tells the turns when it begins and what each step's loss is."""
    turns = Turns(cpu=time.process_time, **sampled.counters)

    class ReportToTurns(base):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                sampled.add(logs, 0.0)
                turns(logs["loss"])

    return ReportToTurns()


def rows_of(job: dict[str, Any]) -> Any:
    """The rows as TRL wants them."""
    lines = Path(job["rows"]).read_text().splitlines()
    return importlib.import_module("datasets").Dataset.from_list([json.loads(line) for line in lines])


def shared(job: dict[str, Any]) -> dict[str, Any]:
    """What is asked of each trainer: what `tllm train` does by default, and a line of logs a step."""
    return dict(
        output_dir=job["out"],
        use_cpu=True,
        bf16=job["dtype"] == "bfloat16",
        per_device_train_batch_size=job["batch"],
        gradient_checkpointing=False,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def tokenizer(job: dict[str, Any]) -> Any:
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(job["folder"])


def sft(trl: Any, model: Any, job: dict[str, Any]) -> Any:
    config = trl.SFTConfig(**shared(job), max_length=job["length"], train_sampling_strategy="sequential")
    return trl.SFTTrainer(model, config, train_dataset=rows_of(job), processing_class=tokenizer(job))


def dpo(trl: Any, model: Any, job: dict[str, Any]) -> Any:
    more = dict(max_length=None, precompute_ref_log_probs=job["precompute"], train_sampling_strategy="sequential")
    config = trl.DPOConfig(**shared(job), **more)
    return trl.DPOTrainer(model, args=config, train_dataset=rows_of(job), processing_class=tokenizer(job))


def grpo(trl: Any, model: Any, job: dict[str, Any]) -> Any:
    config = trl.GRPOConfig(
        **shared(job),
        num_generations=job["generations"],
        max_completion_length=job["length"],
        generation_kwargs={"min_new_tokens": job["length"]},
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
    )
    return trl.GRPOTrainer(model, even_words, config, train_dataset=rows_of(job), processing_class=tokenizer(job))


if __name__ == "__main__":
    main()
