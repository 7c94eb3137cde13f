"""Train the built-in model with TRL's ``GRPOTrainer``, while this server generates: ``python -m examples.rl.train``.

The model is rewarded for right answers to arithmetic problems. After each optimiser step, its weights are written to a
directory, and the server replaces its own by them. Each answer names the weights that generated it, and training stops
with an error if these are not those of the step before. The last line is one JSON object.

The server and TRL use a GPU if there is one.
"""

import json
import math
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from pydantic import Field, model_validator
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from bench.server import serve
from services.cli.bench.problems import Problem
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.model.files import resolve


class TrainConfig(Config):
    """The flags."""

    model: str = Field("builtin", description="a model that knows the form of the problems")
    server: str | None = Field(
        None, description="a running server of the model, e.g. http://127.0.0.1:10210; default: start one"
    )
    weights: str | None = Field(
        None, description="a directory below the server's weight_directories; default: a temporary one"
    )
    steps: Int = Field(30, ge=1)
    prompts: Int = Field(8, ge=1, description="problems in a step")
    samples: Int = Field(8, ge=2, description="answers to each problem")
    max_tokens: Int = Field(96, ge=1, description="most tokens of an answer")
    temperature: Float = Field(1.0, gt=0)
    learning_rate: Float = Field(1e-4, gt=0)
    plot: str | None = Field(None, description="PNG: the reward by step")

    @model_validator(mode="after")
    def _together(self) -> "TrainConfig":
        if (self.server is None) != (self.weights is None):
            raise ValueError("flags server and weights: set both or neither")
        return self


class Rollouts:
    """The server that generates, and the versions of its weights."""

    def __init__(self, config: TrainConfig, url: str, directory: Path, tokenizer: Any) -> None:
        self._config = config
        self._directory = directory
        self._tokenizer = tokenizer
        self._http = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self._version = ""
        self.logprob_difference = math.nan  # between server and trainer, of the last step
        self.push_s = math.nan  # of the last push

    def push(self, model: Any, step: int) -> None:
        """Replace the server's weights by those of ``model``. Keep only their directory."""
        began, version = time.perf_counter(), f"step-{step}"
        model.save_pretrained(self._directory / version)
        self._post("/update_weights_from_disk", model_path=str(self._directory / version), weight_version=version)
        if self._version:
            shutil.rmtree(self._directory / self._version)
        self._version = version
        self.push_s = time.perf_counter() - began

    def generate(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """Sample answers. A prompt is repeated ``num_generations`` times, and gets an answer each time.

        This is TRL's ``rollout_func``. Raises ``RuntimeError`` if other weights than the last ones answered.
        """
        different = self._tokenizer(prompts[:: trainer.num_generations])["input_ids"]
        body = {
            "model": self._config.model,
            "prompt": different,
            "n": trainer.num_generations,
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
            "top_p": 1,
            "top_k": 0,
            "seed": trainer.state.global_step,
            "logprobs": 0,
            "logprobs_mode": "processed",  # of the distribution at this temperature, as TRL computes them
            "return_token_ids": True,
            "include_stop_str_in_output": True,  # so that the last token has a log-probability, too
        }
        choices = sorted(self._post("/v1/completions", **body)["choices"], key=lambda choice: choice["index"])
        for choice in choices:
            expected = [{"version": self._version, "tokens": len(choice["token_ids"])}]
            if choice.get("weights") != expected:
                raise RuntimeError(f"an answer is of the weights {choice.get('weights')}, and not of {expected}")
        answers = {
            "prompt_ids": [ids for ids in different for _ in range(trainer.num_generations)],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }
        self.logprob_difference = self._compare(trainer.model, *(answers[name][0] for name in answers))
        return answers

    @torch.no_grad()
    def _compare(self, model: Any, prompt: list[int], answer: list[int], logprobs: list[float]) -> float:
        """Return the largest difference between the server's log-probabilities of an answer and the trainer's."""
        tokens = torch.tensor([prompt + answer], device=model.device)
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float() / self._config.temperature
        ours = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        return float((ours.cpu() - torch.tensor(logprobs)).abs().max())

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        if response.is_error:
            raise RuntimeError(f"{path}: {response.text}")
        return response.json()


class Push(TrainerCallback):
    """Pushes the weights before the first step and after each one, and notes the figures of each step."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self.rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        self._rollouts.push(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        self._rollouts.push(model, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        if "reward" not in logs:
            return
        self.rewards.append(logs["reward"])
        print(
            f"step {state.global_step:3}: reward {logs['reward']:.3f}, {logs['completions/mean_length']:.0f} tokens an"
            f" answer, log-probabilities differ by {self._rollouts.logprob_difference:.1e},"
            f" push {self._rollouts.push_s * 1e3:.0f} ms",
            flush=True,
        )


def main() -> None:
    config = from_command_line(TrainConfig)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    logging.disable_progress_bar()
    began = time.perf_counter()
    with running_server(config) as (url, directory):
        rewards = train(config, url, directory)
    if config.plot is not None:
        draw(rewards, Path(config.plot))
    print(json.dumps({"rewards": rewards, "seconds": time.perf_counter() - began}))


@contextmanager
def running_server(config: TrainConfig) -> Iterator[tuple[str, Path]]:
    """Yield the URL of the server, and the directory for weights. Start a server if none is given."""
    if config.server is not None and config.weights is not None:
        yield config.server, Path(config.weights)
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="toka-rl-", dir=memory if memory.is_dir() else None) as directory:
        # On a GPU, the trainer needs memory beside the server.
        flags = {"model": config.model, "weight_directories": directory, "kv_cache_num_tokens": 64 * 1024}
        with serve(**flags, dtype="bfloat16" if torch.cuda.is_available() else "float32") as server:
            yield server.base_url, Path(directory)


def train(config: TrainConfig, url: str, directory: Path) -> list[float]:
    """Train the model. Return the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(config.model, weights=True))
    rollouts = Rollouts(config, url, directory, tokenizer)
    push = Push(rollouts)
    settings = GRPOConfig(
        output_dir=str(directory / "trl"),
        max_steps=config.steps,
        per_device_train_batch_size=config.prompts * config.samples,
        num_generations=config.samples,
        max_completion_length=config.max_tokens,
        temperature=config.temperature,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(resolve(config.model, weights=True), dtype=torch.float32),
        args=settings,
        processing_class=tokenizer,
        train_dataset=make_problems(config.prompts * config.steps),
        reward_funcs=is_right,
        rollout_func=rollouts.generate,
        callbacks=[push],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return push.rewards


def make_problems(count: int) -> Dataset:
    """Return problems of two operations, in the form of the word problems that the model was trained on."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        one, other, digit = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
        text, result = rng.choice(
            [
                (f"{one}*{digit}+{other}", one * digit + other),
                (f"{one}+{other}+{digit}", one + other + digit),
                (f"{one}+{other}-{digit}", one + other - digit),
                (f"{one}-{digit}+{other}", one - digit + other),
            ]
        )
        problem = Problem("arithmetic", f"What is {text}?", str(result))
        rows.append({"prompt": problem.prompt, "answer": problem.answer})
    return Dataset.from_list(rows)


def is_right(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    """Return 1 for each answer with the right final number, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(Problem("arithmetic", "", right).solved_by(text)) for text, right in pairs]


def draw(rewards: list[float], target: Path) -> None:
    """Draw the reward of each step, and its mean over five steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(rewards) + 1)
    means = [sum(rewards[max(0, step - 5) : step]) / min(5, step) for step in steps]
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(steps, rewards, "o", color="#b8bcc4", markersize=4, label="step")
    axes.plot(steps, means, color="#2f6fb5", label="mean of five steps")
    axes.set(xlabel="optimiser step", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
